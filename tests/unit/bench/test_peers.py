"""Peers: what cannot run is reported with the reason, and the model they get is the one that we serve."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from phloem.bench import metrics, peers
from phloem.bench.hf_folder import write_hf_folder
from phloem.bench.peers import Peer, PeerError, Place
from phloem.bench.workloads import Sizes
from phloem.errors import UsageError
from phloem.models.load import load_model
from phloem.models.weights import dequantize

FAKE = Path(__file__).with_name("fake_server.py")


def fake_peer(name: str, command: list[str]) -> Peer:
    return Peer(name, "no weights", lambda place: place.model, lambda place: None, lambda place, port: command)


def serve_fake(place: Place, port: int, *, dies_after: int = 1000) -> list[str]:
    """A fake server; it ends without a word at its answer number `dies_after`."""
    code = (
        "import asyncio, itertools, os, runpy\n"
        f"m = runpy.run_path({str(FAKE)!r})\n"
        "stream, count = m['FakeServer'].stream, itertools.count(1)\n"
        "def dying(self, body, writer):\n"
        f"    return os._exit(1) if next(count) == {dies_after} else stream(self, body, writer)\n"
        "m['FakeServer'].stream = dying\n"
        "async def main():\n"
        f"    listener = await asyncio.start_server(m['FakeServer']().handle, '127.0.0.1', {port})\n"
        "    async with listener: await listener.serve_forever()\n"
        "asyncio.run(main())"
    )
    return [sys.executable, "-c", code]


def test_one_peer_that_fails_does_not_stop_the_others(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(place: Place) -> None:
        raise PeerError("absent: no wheel for this machine")

    absent = Peer("absent", "none", lambda place: place.root / "never", refuse, lambda place, port: [])
    dying = fake_peer("dying", ["sh", "-c", "echo cannot start here; exit 1"])
    leaving = replace(fake_peer("leaving", []), command=partial(serve_fake, dies_after=4))
    working = replace(fake_peer("working", []), command=serve_fake)
    monkeypatch.setattr(peers, "PEERS", (absent, dying, leaving, working))
    monkeypatch.setattr(peers, "WORKLOADS", {"small": ("chat", Sizes(agents=2, turns=2, output_tokens=3))})
    out = tmp_path / "p.json"
    assert peers.main(["--root", str(tmp_path), "--workloads", "small", "--json", str(out)]) == 0
    (run,) = metrics.read_results(out)
    assert run["label"] == "working (no weights)"
    assert run["summary"]["num_requests"] == 4
    assert run["summary"]["num_errors"] == 0
    assert run["summary"]["ideal_hit_rate"] > 0
    shown = capsys.readouterr().out
    assert "could not run absent (none): absent: no wheel for this machine" in shown
    assert "could not run dying (no weights): the server ended with exit code 1: cannot start here" in shown
    assert "could not run leaving (no weights): the server went away" in shown
    assert "| prompt + output, tok/s |" in shown


def test_preparing_reports_the_end_of_the_log(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "m.gguf")
    with pytest.raises(PeerError, match=r"x: sh failed: no disk"):
        peers.run_logged(place, "x", ["true"], ["sh", "-c", "echo no disk; exit 1"], ["touch", str(tmp_path / "later")])
    assert not (tmp_path / "later").exists()


def test_every_command_listens_on_loopback_only(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "m.gguf")
    place.folder.mkdir()
    (place.folder / "model.safetensors").touch()
    for peer in peers.PEERS:
        command = peer.command(place, 4321)
        assert any("4321" in word for word in command)
        if peer.name in ("llama-server", "vLLM"):
            assert command[command.index("--host") + 1] == "127.0.0.1"


def test_the_folder_holds_the_same_model(tmp_path: Path, demo_model: Path) -> None:
    folder = write_hf_folder(demo_model, tmp_path / "folder")
    ours, theirs = load_model(demo_model), load_model(folder)
    assert theirs.spec == ours.spec
    assert theirs.tokenizer.eos_ids == ours.tokenizer.eos_ids
    text = "Numbers 123 and code: def f(x): return x\n\n naïve 🙂"
    assert theirs.tokenizer.encode(text) == ours.tokenizer.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert theirs.tokenizer.render_chat(messages) == ours.tokenizer.render_chat(messages)
    for name in ("embed", "layers.0.q", "layers.29.down", "final_norm"):
        assert np.array_equal(dequantize(theirs.weights[name]), dequantize(ours.weights[name]))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    write_hf_folder(demo_model, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_scaled_rope_is_not_converted(tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phloem.bench import hf_folder

    model = load_model(demo_model)
    scaled = replace(model, spec=replace(model.spec, rope=replace(model.spec.rope, kind="linear", factor=2.0)))
    monkeypatch.setattr(hf_folder, "load_model", lambda path: scaled)
    with pytest.raises(UsageError, match="scales its rope"):
        write_hf_folder(demo_model, tmp_path / "x")


def test_the_shim_needs_nothing_but_its_own_library() -> None:
    spec = importlib.util.find_spec("phloem.bench.openvino_shim")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)

"""The comparison with llama.cpp: turns, choices and ratios, with fake engines in its place."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phloem.bench import vs_llama, vs_phloem, vs_worker
from phloem.bench.peers import PeerError, Place

# Answers like vs_worker, with speeds from its arguments, and notes in a log when it works.
FAKE = """
import json, sys
name, log, factor = sys.argv[1], sys.argv[2], float(sys.argv[3])
print("{}", flush=True)
for line in sys.stdin:
    cases = json.loads(line)["cases"]
    with open(log, "a") as file: print(name, *cases, file=file)
    print(json.dumps({case: factor * int(case.split("-")[1]) for case in cases} | {"peak_rss": 1e6}), flush=True)
"""


def fake(name: str, log: Path, factor: float) -> list[str]:
    return [sys.executable, "-c", FAKE, name, str(log), str(factor)]


class Recorder:
    """An engine that draws the position as the next token; a tick passes with each token."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.now_s = 0.0

    def forward(self, tokens: Sequence[Sequence[int]], position: int) -> list[int]:
        self.calls.append((len(tokens), len(tokens[0]), position))
        self.now_s += sum(map(len, tokens))
        if len(tokens[0]) == 1:
            assert tokens[0][0] == position - 1
        return [position + len(run) - 1 for run in tokens]


def test_one_prompt_serves_both_cases_of_its_length() -> None:
    engine = Recorder()
    cases = ["decode-2048", "prefill-2048"]
    assert vs_worker.run_cases(engine, cases, lambda: engine.now_s) == dict.fromkeys(cases, 1.0)
    drawing = [(1, 1, 2048 + i) for i in range(vs_worker.NUM_DECODED)]
    assert engine.calls == [*((1, 512, start) for start in (0, 512, 1024, 1536)), *drawing]


def test_nothing_is_drawn_for_a_prompt_alone() -> None:
    engine = Recorder()
    assert vs_worker.run_cases(engine, ["prefill-512"], lambda: engine.now_s) == {"prefill-512": 1.0}
    assert engine.calls == [(1, 512, 0)]


def test_streams_go_forward_together() -> None:
    engine = Recorder()
    assert vs_worker.run_cases(engine, ["streams-16"], lambda: engine.now_s) == {"streams-16": 1.0}
    assert engine.calls == [(16, 32, 0), *((16, 1, 32 + i) for i in range(vs_worker.NUM_DECODED))]


def test_the_worker_answers_line_by_line() -> None:
    replies = io.StringIO()
    vs_worker.answer(Recorder(), io.StringIO('{"cases": ["decode-32"]}\n{"cases": []}\n'), replies)
    ready, first, second = map(json.loads, replies.getvalue().splitlines())
    assert ready == {}
    assert first["decode-32"] > 0
    assert set(second) == {"peak_rss"}


def test_engines_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    a, b = fake("a", log, 3.0), fake("b", log, 2.0)
    engines = {"phloem": {"prefill": a, "decode": a}, "llama.cpp X": {"prefill": b, "decode": fake("c", log, 1.0)}}
    runs = vs_llama.alternate(engines, ["prefill-512", "decode-32"], 2)
    assert log.read_text().splitlines() == ["a prefill-512 decode-32", "b prefill-512", "c decode-32"] * 2
    assert [run["llama.cpp X"]["decode-32"] for run in runs] == [32.0, 32.0]
    found = vs_llama.figure("decode-32", runs)
    assert found["ratios"]["llama.cpp X"] == {"median": 3.0, "lowest": 3.0, "highest": 3.0}
    assert "| decode-32 | 96.0 (96.0-96.0) | 32.0 (32.0-32.0) | 3.00 (3.00-3.00) |" in vs_llama.markdown(
        {"decode-32": found}
    )


def test_the_best_type_counts_and_ratios_are_taken_round_by_round() -> None:
    runs = [
        {"phloem": {"x": 10.0}, "llama.cpp A": {"x": 5.0}, "llama.cpp B": {"x": 4.0}},
        {"phloem": {"x": 30.0}, "llama.cpp A": {"x": 10.0}, "llama.cpp B": {"x": 40.0}},
        {"phloem": {"x": 12.0}, "llama.cpp A": {"x": 6.0}, "llama.cpp B": {"x": 5.0}},
    ]
    found = vs_llama.figure("x", runs)
    assert found["best"] == "llama.cpp A"
    assert found["ratios"]["llama.cpp A"] == {"median": 2.0, "lowest": 2.0, "highest": 3.0}


def test_the_faster_setting_is_chosen_for_prompts_and_for_drawing(tmp_path: Path) -> None:
    code = FAKE.replace("factor * int", "(factor if case[0] == 'p' else 1 / factor) * int")

    def command(setting: vs_llama.Setting) -> list[str]:
        return [sys.executable, "-c", code, "x", str(tmp_path / "log"), str(setting[0] + setting[1] / 2)]

    cases = ["prefill-512", "prefill-2048", "decode-32"]
    assert vs_llama.best_settings(command, [(1, 0), (1, 1), (2, 0), (2, 1)], cases) == {
        "prefill": (2, 1),
        "decode": (1, 0),
    }
    assert (tmp_path / "log").read_text().splitlines() == ["x prefill-2048 decode-32"] * 8
    assert vs_llama.best_settings(command, [(7, 1)], cases) == {"prefill": (7, 1), "decode": (7, 1)}
    assert vs_llama.best_settings(command, [(1, 0), (1, 1)], ["streams-16"]) == {"decode": (1, 0)}


def test_an_engine_that_dies_is_named() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(PeerError, match="ended with exit code 3"), vs_llama.Process(command):
        pass


def test_the_whole_command(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(vs_llama, "install", lambda place: None)
    monkeypatch.setattr(vs_llama, "typed_model", lambda place, name: place.root / name)
    monkeypatch.setattr(vs_llama, "llama", lambda place, model, setting: fake(model.name, log, 1.0))
    out = tmp_path / "out.json"
    words = ["--root", str(tmp_path), "--json", str(out), "--rounds", "1", "--cases", "decode-32", "--types", "Q8_0"]
    assert vs_llama.main(words) == 0
    shown = capsys.readouterr().out
    assert "| tok/s | phloem | llama.cpp Q8_0 | ratio to its best |" in shown
    written = json.loads(out.read_text())
    assert written["figures"]["decode-32"]["best"] == "llama.cpp Q8_0"
    assert written["runs"][0]["phloem"]["decode-32"] > 0


def test_phloem_appends_to_each_sequence(demo_model: Path) -> None:
    """A sequence's next token is the same alone and beside others, and after going back."""
    engine = vs_phloem.Phloem(str(demo_model), 1, "auto")
    prompts = [[500 + i, 600, 700, 800 + 3 * i] for i in range(3)]
    together = engine.forward(prompts, 0)
    alone = [engine.forward([prompt], 0) for prompt in prompts]
    assert [[token] for token in together] == alone
    engine.forward([prompts[0]], 0)
    assert engine.forward([[800]], 3) == alone[0]


def test_the_file_itself_is_used_where_it_has_the_type(tmp_path: Path) -> None:
    model = tmp_path / "m.Q4_1.gguf"
    assert vs_llama.typed_model(Place(tmp_path, model), "Q4_1") == model


def test_the_worker_needs_nothing_but_its_own_library() -> None:
    tree = ast.parse(Path(vs_worker.__file__).read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - {"llama_cpp"} <= set(sys.stdlib_module_names)

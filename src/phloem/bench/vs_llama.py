"""`phloem bench vs-llama`: phloem and llama.cpp in turns, in one run, on the same model file.

Owns the peer's installation, the turns and the ratios. Must not know how an engine computes: each is a process (its own
interpreter, see vs_worker) that waits while another one works. llama.cpp gets what suits it best: the faster of its
thread counts, flash attention on or off, and three weight types, of which the best for each case counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from phloem import __version__
from phloem.bench import metrics, vs_worker
from phloem.bench.peers import LLAMA_ISAS, LLAMA_SDIST, PeerError, Place, build_llama, llama_libraries, run_logged
from phloem.models.find_model import find_model

PEER = "llama-cpp-python"
TYPES = ("Q8_0", "Q4_0", "Q4_1")
KINDS = ("prefill", "decode")
"""Prompts, and drawing tokens: llama.cpp's best threads and flash attention may differ between the two."""
TRIES = 2
US = "phloem"

Setting = tuple[int, int]
"""llama.cpp's threads, and 1 for flash attention."""


def main(argv: Sequence[str]) -> int:
    """Install what is missing, measure, print, write the JSON. Exit code 0."""
    parser = argparse.ArgumentParser(prog="phloem bench vs-llama", description=(__doc__ or "").partition("\n")[0])
    cores, cases = len(os.sched_getaffinity(0)), vs_worker.CASES
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=list(cases), metavar="CASE", help=f"of {', '.join(cases)}"
    )
    parser.add_argument(
        "--types", nargs="+", choices=TYPES, default=list(TYPES), metavar="TYPE", help=f"of {', '.join(TYPES)}"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, cores}), metavar="N", help="to try")
    parser.add_argument("--flash", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="flash attention, to try")
    parser.add_argument("--isa", choices=LLAMA_ISAS, default="auto", help="of both engines (default: auto, the best)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns; medians are shown (default: 3)")
    parser.add_argument("--root", default="build/peers", metavar="DIR", help="peer and models (default: build/peers)")
    parser.add_argument("--model", default="", metavar="PATH", help="a .gguf file (default: the demo model)")
    parser.add_argument("--prepare", action="store_true", help="install only, measure nothing")
    parser.add_argument("--json", default="bench-vs-llama.json", metavar="FILE", help="(default: bench-vs-llama.json)")
    arguments = parser.parse_args(argv)
    place = Place(Path(arguments.root).resolve(), find_model(arguments.model).resolve(), arguments.isa)
    install(place)
    models = {name: typed_model(place, name) for name in arguments.types}
    if arguments.prepare:
        return 0
    tried = [(threads, flash) for threads in arguments.threads for flash in arguments.flash]
    settings = best_settings(lambda setting: llama(place, place.model, setting), tried, arguments.cases)
    ours = [sys.executable, "-m", "phloem.bench.vs_phloem", str(place.model), str(cores), place.isa]
    engines = {US: dict.fromkeys(settings, ours)}
    for name, model in models.items():
        engines[f"llama.cpp {name}"] = {kind: llama(place, model, settings[kind]) for kind in settings}
    runs = alternate(engines, arguments.cases, arguments.rounds)
    figures = {case: figure(case, runs) for case in arguments.cases}
    print(markdown(figures))
    for kind, (threads, flash) in settings.items():
        print(f"llama.cpp, {kind}: {threads} threads, flash attention {'on' if flash else 'off'}")
    head = {
        "phloem": __version__,
        "isa": place.isa,
        "llama.cpp": LLAMA_SDIST,
        "model": place.model.name,
        **metrics.machine(),
    }
    metrics.write_json(Path(arguments.json), {**head, "settings": settings, "figures": figures, "runs": runs})
    return 0


def install(place: Place) -> None:
    """Build llama.cpp, and install llama-cpp-python, which is told at run time which build to load, without its own."""
    build_llama(place)
    complete = place.root / PEER / "complete"
    if complete.exists():
        return
    python = str(place.python(PEER))
    flags = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    make = [sys.executable, "-m", "venv", str(place.root / PEER)]
    run_logged(place, PEER, make, [python, "-m", "pip", "install", "--no-binary", PEER, LLAMA_SDIST], env=flags)
    complete.touch()


def typed_model(place: Place, name: str) -> Path:
    """The model with weights of a type: the file itself where it has it, else converted by llama.cpp, once."""
    if name in place.model.stem.upper():
        return place.model
    target = place.root / f"{place.model.stem}.{name}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        run_logged(place, f"quantize-{name}", [*worker(place), "quantize", str(place.model), str(part), name])
        part.rename(target)
    return target


def worker(place: Place) -> list[str]:
    """vs_worker under llama.cpp's interpreter."""
    libraries = f"LLAMA_CPP_LIB_PATH={llama_libraries(place)}"
    return ["env", libraries, str(place.python(PEER)), "-P", vs_worker.__file__]


def llama(place: Place, model: Path, setting: Setting) -> list[str]:
    """Command of a llama.cpp process."""
    return [*worker(place), "serve", str(model), *map(str, setting)]


class Process:
    """One engine's process; a context manager that ends it. It waits for cases on its standard input."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> dict[str, float]:
        """Its next reply. Raises PeerError when it has ended instead."""
        assert self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise PeerError(f"{' '.join(self._command)} ended with exit code {self._child.wait()}")
        reply: dict[str, float] = json.loads(line)
        return reply

    def run(self, cases: Sequence[str]) -> dict[str, float]:
        """Tokens per second of each case, and `peak_rss` in bytes."""
        assert self._child.stdin
        self._child.stdin.write(json.dumps({"cases": list(cases)}) + "\n")
        self._child.stdin.flush()
        return self.read()

    def __enter__(self) -> Self:
        try:
            self.read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        with self._child:
            pass


def best_settings(
    command: Callable[[Setting], list[str]], settings: Sequence[Setting], cases: Sequence[str]
) -> dict[str, Setting]:
    """The setting that does best in the longest case of each kind that is asked for, of the best of two tries each."""
    kinds = [kind for kind in KINDS if kind in map(kind_of, cases)]
    probes = {kind: max(cases_of(kind, cases), key=lambda case: int(case.partition("-")[2])) for kind in kinds}
    if len(settings) == 1:
        return dict.fromkeys(kinds, settings[0])
    with ExitStack() as stack:
        processes = {setting: stack.enter_context(Process(command(setting))) for setting in settings}
        tries = [{s: process.run(list(probes.values())) for s, process in processes.items()} for _ in range(TRIES)]
    return {
        kind: max(settings, key=lambda setting: max(speeds[setting][probe] for speeds in tries))
        for kind, probe in probes.items()
    }


def cases_of(kind: str, cases: Sequence[str]) -> list[str]:
    """Those of a kind."""
    return [case for case in cases if kind_of(case) == kind]


def kind_of(case: str) -> str:
    """Whether a case is about prompts or about drawing tokens."""
    return "prefill" if case.startswith("prefill") else "decode"


def alternate(
    engines: Mapping[str, Mapping[str, list[str]]], cases: Sequence[str], rounds: int
) -> list[dict[str, dict[str, float]]]:
    """Per round and engine the figures of each case. All processes are there from the start; one works at a time.

    `engines` gives each engine's command for prompts and for drawing; equal commands share a process.
    """
    with ExitStack() as stack:
        commands = {tuple(command) for engine in engines.values() for command in engine.values()}
        processes = {command: stack.enter_context(Process(command)) for command in sorted(commands)}
        return [{name: _turn(engine, cases, processes) for name, engine in engines.items()} for _ in range(rounds)]


def _turn(
    engine: Mapping[str, list[str]], cases: Sequence[str], processes: Mapping[tuple[str, ...], Process]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for command in dict.fromkeys(tuple(command) for command in engine.values()):
        mine = [case for kind in engine for case in cases_of(kind, cases) if tuple(engine[kind]) == command]
        if mine:
            reply = processes[command].run(mine)
            found |= reply | {"peak_rss": max(reply["peak_rss"], found.get("peak_rss", 0.0))}
    return found


def figure(case: str, runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Median, lowest and highest speed of each engine, and of phloem's ratio to each peer, taken round by round."""
    speeds = {name: [run[name][case] for run in runs] for name in runs[0]}
    ratios = {name: [a / b for a, b in zip(speeds[US], values, strict=True)] for name, values in speeds.items()}
    peers = [name for name in speeds if name != US]
    return {
        "speeds": {name: _spread(values) for name, values in speeds.items()},
        "ratios": {name: _spread(ratios[name]) for name in peers},
        "best": max(peers, key=lambda name: statistics.median(speeds[name])),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def markdown(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a case: tokens per second of each engine, and the ratio to the peer's best, each with its range."""
    names = list(next(iter(figures.values()))["speeds"])
    lines = [f"| tok/s | {' | '.join(names)} | ratio to its best |", "|---" * (len(names) + 2) + "|"]
    for case, found in figures.items():
        cells = [_cell(found["speeds"][name], 1) for name in names]
        lines.append(f"| {case} | {' | '.join(cells)} | {_cell(found['ratios'][found['best']], 2)} |")
    return "\n".join(lines)


def _cell(spread: Mapping[str, float], digits: int) -> str:
    median, lowest, highest = (f"{spread[name]:.{digits}f}" for name in ("median", "lowest", "highest"))
    return f"{median} ({lowest}-{highest})"

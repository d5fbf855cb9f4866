"""`phloem doctor`: what this machine can do, and the most that a model could reach on it.

Owns the ceilings and the wording. Must not know kernels' insides or how an engine is built. A ceiling supposes all
weights (and K/V) read once at the measured bandwidth, or all products done at the measured peak, whichever is slower.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from phloem import __version__
from phloem.cli.report import capacity, say, size
from phloem.cli.serve_args import parse_doctor
from phloem.config import EngineConfig
from phloem.engine.loading import available_memory
from phloem.engine.outlook import Outlook, look
from phloem.errors import UsageError
from phloem.kernels import native

PACKAGES = ("numpy", "tokenizers", "llguidance", "fastapi", "uvicorn", "torch")
CONTEXTS = (0, 2048)
_GPU_CODE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


def doctor(argv: Sequence[str]) -> int:
    """Measure, print, return 0. Takes some seconds; raises what a start of that model would raise."""
    config, as_json = parse_doctor(argv)
    outlook = look(config) if config else None
    machine = examine(config or EngineConfig())
    model = describe(outlook, machine) if outlook else None
    if as_json:
        print(json.dumps({"machine": machine, "model": model}))
        return 0
    for line in (
        *machine_lines(machine),
        *(model_lines(model) if model else ["no model: name one to see its ceilings"]),
    ):
        say(line)
    return 0


def examine(config: EngineConfig) -> dict[str, Any]:
    """Facts of the machine; bandwidth in bytes and peak in operations per second, with the threads a step would use."""
    supported = native.supported_isas()
    if config.isa != "auto" and config.isa not in supported:
        raise UsageError(f"isa {config.isa} is not available: this CPU runs {', '.join(supported)}")
    isa = supported[-1] if config.isa == "auto" else config.isa
    cores = len(os.sched_getaffinity(0))
    threads = config.num_threads or cores
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "phloem": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "gpu": _gpu() if "torch" in versions else "",
        "cpu": _cpu_name(),
        "cores": cores,
        "threads": threads,
        "isa": isa,
        "isas": supported,
        "load": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_bytes": available_memory(),
        "bandwidth": native.measure_bandwidth(threads),
        "peak": native.measure_peak(isa, threads),
    }


def describe(outlook: Outlook, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The model's facts and its ceilings in tokens per second, by tokens of context."""
    cost, bandwidth, peak = outlook.cost, machine["bandwidth"], machine["peak"]

    def decode(context: int) -> float:
        num_bytes = cost.read_bytes + context * cost.kv_bytes_per_token
        num_ops = cost.decode_ops + context * cost.attention_ops
        return float(min(bandwidth / num_bytes, peak / num_ops))

    # A chunk of prompt reads the weights once for all its rows: products decide.
    return {
        **asdict(outlook),
        "decode_ceiling": {str(context): decode(context) for context in CONTEXTS},
        "prefill_ceiling": peak / cost.prefill_ops,
    }


def machine_lines(facts: Mapping[str, Any]) -> list[str]:
    """The machine in words."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    others = [isa for isa in facts["isas"] if isa != facts["isa"]]
    busy = facts["load"] > 0.5
    gpu = (facts["gpu"] or "none that torch sees") if "torch" in facts["packages"] else "torch is not installed"
    return [
        f"version {facts['phloem']}, Python {facts['python']}, {packages}",
        f"cpu: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads a step",
        f"isa: {facts['isa']} (also runs: {', '.join(others) or 'no other'})",
        f"memory: {size(facts['memory_bytes'])}, {size(facts['free_bytes'])} free",
        f"measured: {facts['bandwidth'] / 1e9:.1f} GB/s from memory, {facts['peak'] / 1e9:.0f} GOP/s of integers"
        + (f"; other work runs (load {facts['load']:.1f}), so less than there is" if busy else ""),
        f"gpu: {gpu}",
    ]


def model_lines(facts: Mapping[str, Any]) -> list[str]:
    """The model and its ceilings in words."""
    cost = facts["cost"]
    decode = ", ".join(f"{speed:.0f} tok/s behind {n} tokens" for n, speed in facts["decode_ceiling"].items())
    return [
        f"model {facts['name']} ({facts['architecture']}): {facts['num_parameters'] / 1e6:.0f} M parameters, "
        f"{size(cost['weight_bytes'])} packed as {', '.join(cost['formats'])}",
        f"KV cache: {cost['kv_bytes_per_token'] / 1024:.1f} KiB a token, room for {facts['kv_tokens']} tokens, "
        f"{capacity(facts['kv_tokens'], facts['max_model_len'])}",
        f"at most, one stream: {decode} (weights in the CPU's caches can beat this)",
        f"at most, prompts: {facts['prefill_ceiling']:.0f} tok/s before attention "
        f"({cost['prefill_ops'] / 1e9:.2f} GOP a token)",
    ]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpu() -> str:
    """Asked in a process of its own: torch takes seconds and hundreds of megabytes to load."""
    command = [sys.executable, "-c", _GPU_CODE]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except subprocess.TimeoutExpired:
        return ""

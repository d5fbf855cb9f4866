"""Servers under test as child processes: start, wait until ready, watch the memory, stop.

Owns those processes. Must not know what is sent to them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from phloem.bench.client import ServerError
from phloem.bench.http import HttpClient, ProtocolError

SAMPLE_S = 0.5
"""Distance of memory samples."""


def free_port() -> int:
    """A port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server on loopback, in a process group of its own; a context manager that stops it at the end."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        ready: str = "/health",
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._ready = ready
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Poll until the server answers 200. Raises ServerError with the end of its log when it does not."""
        client = HttpClient(self.url)
        ends_s = time.monotonic() + timeout_s
        try:
            while time.monotonic() < ends_s:
                if self._process.poll() is not None:
                    raise ServerError(f"the server ended with exit code {self._process.returncode}: {self.log_tail()}")
                with suppress(OSError, ProtocolError, TimeoutError):
                    async with asyncio.timeout(5.0):
                        if (await client.request("GET", self._ready)).status == 200:
                            return
                await asyncio.sleep(0.2)
        finally:
            client.close()
        raise ServerError(f"the server was not ready within {timeout_s:.0f} s: {self.log_tail()}")

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of the server's output."""
        return " | ".join(self._log.read_text("utf-8", errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the server and what it started: politely, then not. Idempotent."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def phloem_server(arguments: Sequence[str], *, log: Path) -> ServerProcess:
    """Start `phloem serve` with these arguments on a free port of the loopback address."""
    port = free_port()
    command = [sys.executable, "-m", "phloem.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    return ServerProcess(command, port, log=log)


class MemoryWatch:
    """Samples the resident memory of a process and its children from entry to exit: (seconds from entry, bytes)."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._began_s = time.monotonic()
        self.samples: list[tuple[float, int]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._began_s = time.monotonic()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._sample()

    async def _watch(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(SAMPLE_S)

    def _sample(self) -> None:
        if self._pid is not None:
            self.samples.append((time.monotonic() - self._began_s, resident_bytes(self._pid)))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all it started; 0 when it is gone. Linux only."""
    total = 0
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
        waiting += map(int, children)
    return total

"""Servers as real processes, started by the command that users type."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

START_S = 120.0


class Server:
    """A `phloem serve` process on a free port of the loopback address."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "phloem.cli", "serve", "--port", "0", *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.url = self._wait_ready()
        self.http = httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=self.url + "/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
        )

    def _wait_ready(self) -> str:
        """The address that the ready line names."""
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s and self.process.poll() is None:
            for line in self.output().splitlines():
                if line.startswith("phloem: ready on http://"):
                    return line.removeprefix("phloem: ready on ")
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"no ready line within {START_S} s:\n{self.output()}")

    def output(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

    def stats(self) -> dict[str, Any]:
        return self.http.get("/server_info").raise_for_status().json()["stats"]

    def wait_idle(self) -> dict[str, Any]:
        """Stats once nothing runs; every page must then be free or evictable."""
        ends_s = time.monotonic() + 20.0
        while True:
            stats = self.stats()
            if stats["num_running"] == stats["num_waiting"] == 0:
                break
            assert time.monotonic() < ends_s, f"still busy: {stats}"
            time.sleep(0.05)
        assert stats["kv_num_pages_protected"] == stats["kv_num_cursors"] == 0
        assert stats["kv_num_pages_free"] + stats["kv_num_pages_evictable"] == stats["kv_num_pages_total"]
        return stats

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def shared_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(log, str(demo_model), "--max-total-tokens", "40000")
    yield server
    assert server.process.poll() is None, f"the server died:\n{server.output()}"
    code = server.stop()
    server.close()
    assert code == 0, server.output()
    assert "Traceback" not in server.output()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server with an empty cache; each test ends with nothing held."""
    shared_server.wait_idle()
    shared_server.http.post("/flush_cache").raise_for_status()
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def environment() -> dict[str, str]:
    """For commands that fail at once."""
    return {**os.environ, "NO_COLOR": "1"}

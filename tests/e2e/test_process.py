"""The life of a server process: wrong starts, clients that go away, signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Server


def serve(environment: dict[str, str], *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a start that fails; what it said, and how long it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "phloem.cli", "serve", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - began


def test_port_in_use(environment: dict[str, str], demo_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done, seconds = serve(environment, str(demo_model), "--port", str(port))
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1
    # Long before a model would be loaded; most of it is the start of Python.
    assert seconds < 20.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/no/such/model.gguf"], "/no/such/model.gguf"),
        (["--model-path", "/no/such/folder"], "/no/such/folder"),
        (["--max-runing-requests", "4"], "--max-running-requests"),
        (["--port", "99999999"], "--port"),
    ],
)
def test_wrong_use(environment: dict[str, str], arguments: list[str], told: str) -> None:
    done, _ = serve(environment, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_client_that_goes_away_frees_its_place(server: Server) -> None:
    before = server.stats()
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.stats()["num_running"] == 1
    after = server.wait_idle()
    assert after["num_aborted"] - before["num_aborted"] == 1
    assert after["num_output_tokens"] - before["num_output_tokens"] < 2000


def test_client_that_goes_away_without_a_stream(server: Server) -> None:
    before = server.stats()["num_aborted"]
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=1.0, trust_env=False)
    assert server.wait_idle()["num_aborted"] - before == 1


def test_leader_that_goes_away_does_not_harm_its_followers(server: Server) -> None:
    """Requests that share the prompt of one that is aborted while it is computed get their answers."""
    prompt = list(range(100, 1600))
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answers: list[dict[str, object]] = []

    def follow() -> None:
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120.0, trust_env=False)
        answers.append(reply.json()["choices"][0])

    followers = [threading.Thread(target=follow) for _ in range(3)]
    with server.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}):
        for thread in followers:
            thread.start()
        time.sleep(0.1)
    for thread in followers:
        thread.join(120.0)
    server.wait_idle()
    server.http.post("/flush_cache").raise_for_status()
    cold = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert answers == [cold] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_idle(number: signal.Signals, demo_model: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", str(demo_model), "--max-total-tokens", "2000")
    try:
        assert server.http.get("/health").status_code == 200
        assert server.stop(number) == 0
        assert "Traceback" not in server.output()
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
    finally:
        server.close()


def test_sigterm_lets_running_requests_finish(demo_model: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", str(demo_model), "--max-total-tokens", "2000")
    try:
        body = {"prompt": "Count:", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(30.0) == 0
    finally:
        server.close()

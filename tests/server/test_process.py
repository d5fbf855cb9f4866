"""Servers as real processes: start, signals, crowds of connections, slow readers, memory."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = {"text": "word " * 4000, "delay_s": 0.02, "max_model_len": 30_000}
QUIET = {"trust_env": False, "timeout": 20.0}


class Process:
    """One server process on a free port."""

    def __init__(self, options: dict[str, Any], preexec: Callable[[], None] | None = None) -> None:
        options.setdefault("config", {}).setdefault("port", 0)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.run_fake", json.dumps(options)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=preexec,
        )
        self.url = ""

    def wait_ready(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("ready on "), line or self.popen.communicate()[1]
        self.url = line.split()[-1]
        return self.url

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> tuple[int, str]:
        self.popen.send_signal(number)
        _, errors = self.popen.communicate(timeout=timeout_s)
        return self.popen.returncode, errors

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, **QUIET)  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", **QUIET).text  # type: ignore[arg-type]
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found.group(1))


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def make(preexec: Callable[[], None] | None = None, **options: Any) -> Process:
            process = Process(options, preexec)

            def end() -> None:
                process.popen.kill()
                process.popen.communicate()

            stack.callback(end)
            return process

        yield make


def open_stream(process: Process, read_bytes: int = 1, **fields: Any) -> socket.socket:
    """A raw socket on which a stream has begun; it then reads no more."""
    body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 20_000, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection(process.address, timeout=10.0)
    connection.sendall(head + body)
    if read_bytes:
        connection.recv(read_bytes)
    return connection


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)


def start_loading(start: Callable[..., Process], load_s: float) -> Process:
    """A server that listens already and still loads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(load_s=load_s, config={"port": port})
    process.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{process.url}/health", **QUIET).status_code == 503  # type: ignore[arg-type]
        except httpx.TransportError:
            return False

    wait_until(answers, 20.0)
    return process


def test_health_is_503_while_the_model_loads(start: Callable[..., Process]) -> None:
    process = start_loading(start, 3.0)
    response = process.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]
    process.wait_ready()
    assert process.chat().status_code == 200
    assert process.stop()[0] == 0


def test_a_taken_port_fails_at_once(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        process = start(load_s=60, config={"port": port})
        _, errors = process.popen.communicate(timeout=10.0)
    assert process.popen.returncode == 1
    assert str(port) in errors
    assert len(errors.splitlines()) == 1
    assert time.monotonic() - began < 5.0  # interpreter start and imports included


def test_restart_at_once_on_the_same_port(start: Callable[..., Process]) -> None:
    port = 0
    for _ in range(3):
        process = start(config={"port": port})
        process.wait_ready()
        port = process.address[1]
        assert process.chat().status_code == 200
        assert process.stop()[0] == 0


def test_a_failed_load_is_one_line_and_exit_code_1(start: Callable[..., Process]) -> None:
    process = start(fail="the file is broken; download it again", load_s=0.1)
    _, errors = process.popen.communicate(timeout=15.0)
    assert (process.popen.returncode, errors.strip()) == (1, "the file is broken; download it again")


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_stop_the_start(start: Callable[..., Process], flag: str) -> None:
    process = start(config={flag: "magic"})
    _, errors = process.popen.communicate(timeout=15.0)
    assert process.popen.returncode == 2
    assert "magic" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_an_idle_server(start: Callable[..., Process], number: int) -> None:
    process = start()
    process.wait_ready()
    with socket.create_connection(process.address):
        code, errors = process.stop(number)
    assert (code, errors) == (0, "")


def test_a_signal_while_loading_ends_the_server(start: Callable[..., Process]) -> None:
    process = start_loading(start, 60.0)
    began = time.monotonic()
    assert process.stop()[0] == 0
    assert time.monotonic() - began < 6.0


def test_running_requests_finish_while_new_ones_are_refused(start: Callable[..., Process]) -> None:
    process = start(text="x" * 60, delay_s=0.05)
    process.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(process.chat)
        wait_until(lambda: process.metric("phloem_running") == 1)
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.chat().status_code == 503
        assert httpx.get(f"{process.url}/health", **QUIET).status_code == 503  # type: ignore[arg-type]
        assert answer.result().json()["choices"][0]["message"]["content"] == "x" * 60
    _, errors = process.popen.communicate(timeout=10.0)
    assert process.popen.returncode == 0
    assert re.search(r"stopping: 1 requests still running, \d+ s left", errors)


@pytest.mark.parametrize("second", [False, True])
def test_unread_streams_do_not_hold_the_process(start: Callable[..., Process], second: bool) -> None:
    process = start(config={"drain_timeout_s": 60.0 if second else 1.0}, **LONG)
    process.wait_ready()
    connections = [open_stream(process) for _ in range(3)] + [socket.create_connection(process.address)]
    began = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    if second:
        time.sleep(0.5)
        process.popen.send_signal(signal.SIGINT)
    _, errors = process.popen.communicate(timeout=20.0)
    assert process.popen.returncode == 0
    assert time.monotonic() - began < 10.0
    assert "Traceback" not in errors, errors
    for connection in connections:
        connection.close()


def test_streams_get_an_error_when_the_grace_time_is_over(start: Callable[..., Process]) -> None:
    process = start(config={"drain_timeout_s": 0.5}, **LONG)
    process.wait_ready()
    body = {"prompt": "hi", "stream": True, "max_tokens": 20_000}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, **QUIET) as stream:  # type: ignore[arg-type]
        lines = stream.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    assert "engine_unavailable" in text
    assert text.rstrip().endswith("data: [DONE]")


def test_disconnects_free_their_places(start: Callable[..., Process]) -> None:
    process = start(**LONG)
    process.wait_ready()
    streams = [open_stream(process) for _ in range(5)]
    body = json.dumps({"prompt": "hi", "max_tokens": 20_000}).encode()
    whole = socket.create_connection(process.address)
    whole.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: process.metric("phloem_running") == 6)
    for connection in (*streams, whole):
        connection.close()
    wait_until(lambda: process.metric("phloem_running") == 0, 3.0)
    tokens = process.metric("phloem_output_tokens_total")
    time.sleep(0.3)
    assert process.metric("phloem_output_tokens_total") == tokens


def test_crowds_of_idle_half_open_and_silent_connections(start: Callable[..., Process]) -> None:
    """1,500 idle, 500 with half a head, 150 streams that nobody reads, on 1,024 file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    process = start(limit, text="word " * 4000, max_model_len=30_000, delay_s=0.1)
    process.wait_ready()
    sockets = []
    try:
        sockets += [open_stream(process, 0) for _ in range(150)]
        for number in range(2000):
            connection = socket.create_connection(process.address, timeout=10.0)
            if number % 4 == 0:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
            sockets.append(connection)
        began = time.monotonic()
        assert process.chat(max_tokens=5).status_code == 200
        assert httpx.get(f"{process.url}/health", **QUIET).status_code == 200  # type: ignore[arg-type]
        assert time.monotonic() - began < 10.0
    finally:
        for connection in sockets:
            connection.close()
    wait_until(lambda: process.metric("phloem_running") == 0)


def test_a_reader_that_stops_holds_back_only_itself(start: Callable[..., Process]) -> None:
    """Nothing piles up for it: what the sockets do not take is not generated."""
    process = start(text="word " * 4000, max_model_len=30_000)
    process.wait_ready()
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(process.address)
        body = b'{"prompt": "hi", "stream": true, "max_tokens": 20000, "logprobs": 5}'
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        tokens = -1.0
        while (now := process.metric("phloem_output_tokens_total")) != tokens:
            tokens = now
            time.sleep(0.5)
        assert 0 < tokens < 20_000
        assert process.chat().status_code == 200
    wait_until(lambda: process.metric("phloem_running") == 0)


def test_memory_stays_flat_over_many_requests(start: Callable[..., Process]) -> None:
    process = start(max_model_len=512)
    process.wait_ready()
    status = Path(f"/proc/{process.popen.pid}/status")

    def anonymous_kib() -> int:
        found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status.read_text(), re.MULTILINE)
        return sum(int(number) for number in found)

    sizes = []
    with httpx.Client(base_url=process.url, **QUIET) as client:  # type: ignore[arg-type]
        for _ in range(4):
            for number in range(80):
                body = {"prompt": "hi", "max_tokens": 2, "stream": number % 2 == 0}
                client.post("/v1/completions", json=body)
                client.post("/flush_cache")
            sizes.append(anonymous_kib())
    assert (sizes[3] - sizes[1]) / 160 < 10.0, sizes


def test_a_huge_body_is_refused_before_it_is_read(start: Callable[..., Process]) -> None:
    process = start(config={"max_body_bytes": 1000})
    process.wait_ready()
    with socket.create_connection(process.address, timeout=5.0) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in connection.recv(4096)

    assert process.chat(user="x" * 2000).status_code == 413
    with socket.create_connection(process.address, timeout=5.0) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall((b"1f4\r\n" + b"x" * 500 + b"\r\n") * 3)
        assert b" 413 " in connection.recv(4096)
    assert process.chat().status_code == 200

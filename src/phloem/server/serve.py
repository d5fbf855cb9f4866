"""The life of a server process: bind, load, serve, drain, stop.

Owns signals, the listening socket and the order of events. Must not know routes or how a model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from fastapi import FastAPI

from phloem.config import ServerConfig
from phloem.errors import StartupError
from phloem.server.app import create_app
from phloem.server.connections import ACCEPT_BATCH, ConnectionLimits, GuardedProtocol, raise_file_limit
from phloem.server.context import ServerContext
from phloem.server.engine_api import Engine
from phloem.server.tools import answer_form

_KEEP_ALIVE_S = 75
_KERNEL_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 3
_MAX_HEAD_BYTES = 64 * 1024

Load = Callable[[], Engine]
OnReady = Callable[[Engine, str], None]


def run_server(config: ServerConfig, load: Load, on_ready: OnReady, *, share_cache_across_keys: bool = False) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal forces the end. Returns the exit code 0.

    The port is bound before `load` runs, on a thread of its own, so a taken port fails at once. While
    the model loads, /health answers 503. Raises StartupError from the socket or from `load`.
    """
    listener = bind(config.host, config.port)
    server = ServerProcess(config, listener, load, on_ready, share_cache_across_keys)
    asyncio.run(server.run())
    if server.load_failure is not None:
        raise server.load_failure
    if server.is_loading:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A listening-ready socket; port 0 takes a free one. Raises StartupError naming address and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_KERNEL_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; stop what uses the port, or give another "
            "one with --port (0 takes a free one)"
        ) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The address to type, of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to us and takes connections in small batches."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and let the kernel queue more connections than the event loop accepts in one go."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_KERNEL_BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_uvicorn(app: FastAPI, limits: ConnectionLimits) -> uvicorn.Server:
    """The HTTP server around an app."""
    protocol = type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        backlog=ACCEPT_BATCH,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    return _Uvicorn(config)


class ServerProcess:
    """One server from bound socket to end; lives on one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        load: Load,
        on_ready: OnReady,
        share_cache_across_keys: bool = False,
    ) -> None:
        app = create_app(None, config, share_cache_across_keys=share_cache_across_keys)
        context = app.state.context
        assert isinstance(context, ServerContext)
        self._context = context
        self._config = config
        self._listener = listener
        self._load = load
        self._on_ready = on_ready
        self._server = make_uvicorn(app, ConnectionLimits(max_connections=raise_file_limit()))
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._loader: threading.Thread | None = None
        self.load_failure: BaseException | None = None

    @property
    def is_loading(self) -> bool:
        """Whether the loading thread still runs; it cannot be stopped."""
        return self._loader is not None and self._loader.is_alive()

    async def run(self) -> None:
        """Serve until stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._stop.wait())
        loaded = self._start_loading(loop)
        waited: set[asyncio.Future[Any]] = {loaded, stopping, serving}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done() and self.load_failure is None and not self._stop.is_set():
            self._context.attach(loaded.result())
            self._on_ready(loaded.result(), url_of(self._listener))
            await asyncio.wait(waited - {loaded}, return_when=asyncio.FIRST_COMPLETED)
        await self._end(serving)
        stopping.cancel()

    def _start_loading(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Engine]:
        loaded: asyncio.Future[Engine] = loop.create_future()

        def settle(engine: Engine | None) -> None:
            if engine is None:
                loaded.cancel()
            else:
                loaded.set_result(engine)

        def work() -> None:
            engine = None
            try:
                engine = self._load()
                self._prepare(engine)
            except BaseException as error:
                self.load_failure = error
                if engine is not None:
                    engine.close()
                    engine = None
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(settle, engine)

        self._loader = threading.Thread(target=work, name="phloem-load", daemon=True)
        self._loader.start()
        return loaded

    def _prepare(self, engine: Engine) -> None:
        """Find out what the first requests would stumble over or wait for. Raises UsageError."""
        answer_form(engine.tokenizer, self._config.tool_call_parser, self._config.reasoning_parser)
        engine.tokenizer.token_bytes(0)

    def _on_signal(self) -> None:
        """First: drain. Second: end now. Third: end without clearing up."""
        if self._force.is_set():
            os._exit(0)
        if self._stop.is_set():
            self._force.set()
            self._server.force_exit = True
        self._stop.set()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Drain the engine, then close the connections."""
        self._context.start_draining()
        engine = self._context.engine_or_none
        if engine is not None:
            draining = asyncio.create_task(engine.drain(self._config.drain_timeout_s))
            forcing = asyncio.create_task(self._force.wait())
            counting = asyncio.create_task(self._count_down(engine))
            await asyncio.wait({draining, forcing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (forcing, counting):
                task.cancel()
            if not draining.done():
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
                await asyncio.to_thread(engine.close)
        self._server.should_exit = True
        await serving
        if self._server.force_exit:  # then uvicorn leaves the app waiting, which would end it with a stack trace
            await self._server.lifespan.shutdown()

    async def _count_down(self, engine: Engine) -> None:
        """Say once a second how many requests are still running, and for how long they may."""
        ends_s = time.monotonic() + self._config.drain_timeout_s
        while engine.num_live:
            left_s = max(0.0, ends_s - time.monotonic())
            print(
                f"stopping: {engine.num_live} requests still running, {left_s:.0f} s left (signal again to stop now)",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(1.0)

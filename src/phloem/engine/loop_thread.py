"""An event loop in a thread of its own, for callers that block.

Owns the loop and its thread. Must not know what the coroutines do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from phloem.errors import EngineUnavailableError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of blocking threads. Works beside an event loop of the caller's own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._loop.is_closed()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Result of a coroutine. An interrupt (Ctrl-C) in the caller cancels it."""
        assert threading.current_thread() is not self._thread, "a coroutine on the loop must not wait for the loop"
        if self._loop.is_closed():
            job.close()
            raise EngineUnavailableError("it is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon; nothing happens after `close`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the thread; what still runs is cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

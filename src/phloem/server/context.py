"""Everything that the routes share: the engine once it is there, the configuration, the thread pools, the caller.

Owns who may reuse whose cache (namespaces) and which model names are served. Must not know any route.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from phloem.config import ServerConfig
from phloem.engine.grammar import GrammarCompiler
from phloem.errors import EngineUnavailableError, ModelNotFoundError, QueueFullError
from phloem.server.engine_api import Engine, EngineState
from phloem.server.metrics import ServerMetrics
from phloem.server.response_store import ResponseStore
from phloem.server.structured import AnswerGrammar
from phloem.server.tools import AnswerForm, answer_form
from phloem.types import Namespace, TokenMasker

T = TypeVar("T")

_TOKENIZER_THREADS = 2
_MAX_TOKENIZING = 256
_MAX_COMPILING = 64
_KEY_ID_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as far as it matters: an id that cannot be turned back into the key, and an address."""

    key_id: str = ""
    address: str = ""


@dataclass(slots=True)
class ServerContext:
    """State of one server. `engine_or_none` is None while the model loads."""

    config: ServerConfig
    engine_or_none: Engine | None = None
    share_cache_across_keys: bool = False
    started_s: float = field(default_factory=time.time)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    stored: ResponseStore = field(default_factory=ResponseStore)
    jobs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Engine request ids of each HTTP request that is being answered, by the id that its client knows."""
    _salt: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _tokenizing: int = 0
    _draining: bool = False
    _form: AnswerForm | None = None
    _compiling: int = 0
    _compiler_or_none: GrammarCompiler | None = None
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="phloem-tokenize")
    )
    _grammar_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="phloem-grammar")
    )

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineUnavailableError while it loads."""
        if self.engine_or_none is None:
            raise EngineUnavailableError("the model is still loading; try again in a few seconds")
        return self.engine_or_none

    def attach(self, engine: Engine) -> None:
        """The engine is there: serve."""
        self.engine_or_none = engine
        self.metrics.watch_engine(engine.stats)

    def state(self) -> EngineState:
        if self.engine_or_none is None:
            return "loading"
        state = self.engine_or_none.state()
        return "draining" if self._draining and state == "ready" else state

    def start_draining(self) -> None:
        """From here on new work is refused, before it is tokenised."""
        self._draining = True

    def check_ready(self) -> Engine:
        """The engine, when it takes work. Raises EngineUnavailableError."""
        engine = self.engine
        state = self.state()
        if state != "ready":
            raise EngineUnavailableError(f"the server is {state}; it takes no new requests")
        return engine

    @property
    def model_names(self) -> list[str]:
        """Names that requests may use; the first one is the name in answers. A comma separates aliases."""
        names = [name.strip() for name in self.config.served_model_name.split(",") if name.strip()]
        return names or [self.engine.model_name]

    def check_model(self, name: str | None) -> str:
        """The served name. An absent or empty name means the served model; an unknown one is an error."""
        names = self.model_names
        if name and name not in names:
            raise ModelNotFoundError(
                f"the model {name[:100]!r} is not served here; served: {', '.join(names)}", param="model"
            )
        return names[0]

    def key_id(self, key: str) -> str:
        """A name for a key: fixed length, the same while the server runs, useless to whoever sees it."""
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=_KEY_ID_LENGTH // 2).hexdigest()

    def namespace(self, caller: Caller, cache_salt: str | None) -> Namespace:
        """What the caller's requests may share K/V with. Key ids have one length, so no two pairs meet."""
        key_id = "" if self.share_cache_across_keys else caller.key_id
        return Namespace(cache_salt=f"{key_id}:{cache_salt or ''}" if key_id or cache_salt else "")

    async def in_pool(self, function: Callable[[], T]) -> T:
        """Run a function on the small pool of tokenising threads. Raises QueueFullError when many wait already."""
        if self._tokenizing >= _MAX_TOKENIZING:
            raise QueueFullError(f"{_MAX_TOKENIZING} requests wait to be tokenised; try again", retry_after_s=1)
        self._tokenizing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        finally:
            self._tokenizing -= 1

    @property
    def answer_form(self) -> AnswerForm:
        """How the model writes tool calls and thoughts; worked out once."""
        if self._form is None:
            config = self.config
            self._form = answer_form(self.engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
        return self._form

    async def maskers(self, wanted: AnswerGrammar | None, count: int) -> tuple[TokenMasker, ...]:
        """Grammar states for `count` sequences, compiled on a thread of their own. Raises InvalidRequestError."""
        if wanted is None:
            return ()
        if self._compiling >= _MAX_COMPILING:
            raise QueueFullError(f"{_MAX_COMPILING} grammars wait to be compiled; try again", retry_after_s=2)
        self._compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._grammar_pool, lambda: self._compiler().maskers(wanted.grammar, count, wanted.param)
            )
        finally:
            self._compiling -= 1

    def _compiler(self) -> GrammarCompiler:
        """The compiler, built at its first use; runs on the one grammar thread."""
        if self._compiler_or_none is None:
            self._compiler_or_none = GrammarCompiler(self.engine.tokenizer)
        return self._compiler_or_none

    def close(self) -> None:
        """Let go of the threads; work that waits there is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)


def context_of(request: HttpRequest) -> ServerContext:
    """The context of the app that a request came to."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def caller_of(request: HttpRequest) -> Caller:
    """Who sent a request."""
    key_id = request.scope.get("phloem.key_id", "")
    return Caller(key_id=key_id, address=request.client.host if request.client else "")


def request_id_of(request: HttpRequest) -> str:
    """The id of a request in the log and in the X-Request-Id header."""
    return str(request.scope.get("phloem.request_id", ""))

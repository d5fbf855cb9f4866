"""`phloem serve`, `run` and `doctor`: from their arguments to config objects.

Owns which flags each takes. Must not know what they do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from phloem.cli.flags import Parser, add_flags, build, modernise
from phloem.cli.serve_keys import add_key_flags, gather_keys
from phloem.config import EngineConfig, ServerConfig
from phloem.errors import InvalidRequestError, UsageError
from phloem.models.find_model import find_model
from phloem.types import SamplingParams

CHAT_TEMPERATURE = 0.2
"""What `phloem run` draws with unless told otherwise: small models say little of sense at 1."""

CHAT_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class ServeArgs:
    """What `phloem serve` was asked for, resolved; `warnings` are lines to show."""

    engine: EngineConfig
    server: ServerConfig
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunArgs:
    """What `phloem run` was asked for, resolved."""

    engine: EngineConfig
    params: SamplingParams
    system: str = ""
    warnings: list[str] = field(default_factory=list)


def parse_serve(argv: Sequence[str]) -> ServeArgs:
    """Raise UsageError on a wrong flag, value or model path. `--help` prints and exits with 0."""
    parser = Parser(prog="phloem serve", description="Serve a model over HTTP, in the forms of the OpenAI API.")
    _add_model(parser)
    server_flags = parser.add_argument_group("server")
    add_flags(server_flags, ServerConfig)
    add_key_flags(server_flags)
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip={"model"})
    words, warnings = modernise(argv)
    arguments = parser.parse_strict(words)
    engine = build(EngineConfig, arguments, model=_model(arguments))
    server = build(ServerConfig, arguments, **gather_keys(arguments, os.environ))
    if not 0 <= server.port < 1 << 16:
        raise UsageError(f"--port must be from 0 to 65535, got {server.port}")
    if server.host not in ("127.0.0.1", "localhost", "::1") and not server.api_keys:
        warnings.append(f"listening on {server.host} with no --api-key: whoever reaches this port can use the model")
    return ServeArgs(engine, server, warnings)


def parse_run(argv: Sequence[str]) -> RunArgs:
    """Raise UsageError on a wrong flag, value or model path. `--help` prints and exits with 0."""
    parser = Parser(prog="phloem run", description="Chat with a model in the terminal.")
    _add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message that opens the chat")
    chat = parser.add_argument_group("sampling")
    default = SamplingParams(temperature=CHAT_TEMPERATURE)
    for name in CHAT_FIELDS:
        value = getattr(default, name)
        kind = float if isinstance(value, float) else int
        shown = "none" if value is None else value
        flag = "--" + name.replace("_", "-")
        chat.add_argument(flag, type=kind, default=value, metavar="N", help=f"(default: {shown})")
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip={"model"})
    words, warnings = modernise(argv)
    arguments = parser.parse_strict(words)
    engine = build(EngineConfig, arguments, model=_model(arguments))
    try:
        params = SamplingParams(**{name: getattr(arguments, name) for name in CHAT_FIELDS})
    except InvalidRequestError as error:
        raise UsageError(f"--{error.message}") from None
    return RunArgs(engine, params, arguments.system, warnings)


def parse_doctor(argv: Sequence[str]) -> tuple[EngineConfig | None, bool]:
    """The engine to look at, None for the machine alone where no demo model is installed; and whether to print JSON."""
    parser = Parser(prog="phloem doctor", description="Say what this machine can do, and what a model would reach.")
    _add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip={"model"})
    words, _ = modernise(argv)
    arguments = parser.parse_strict(words)
    try:
        model = _model(arguments)
    except UsageError:
        if arguments.MODEL or arguments.model:
            raise
        return None, arguments.json
    return build(EngineConfig, arguments, model=model), arguments.json


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", nargs="?", help="a .gguf file or a Hugging Face-format folder; absent: the demo model")
    parser.add_argument("-m", "--model", "--model-path", dest="model", metavar="MODEL", help="the same, as a flag")


def _model(arguments: argparse.Namespace) -> str:
    if arguments.MODEL and arguments.model:
        raise UsageError(f"two models given, {arguments.MODEL} and {arguments.model}; name one")
    return str(find_model(arguments.MODEL or arguments.model or ""))

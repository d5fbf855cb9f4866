"""`phloem serve`: reads the arguments, starts the server, says what it does.

Owns the order of the start-up report. Must not know routes or the engine's insides.
"""

from __future__ import annotations

from collections.abc import Sequence

from phloem.cli.report import ProgressLine, engine_facts, ready, say
from phloem.cli.serve_args import parse_serve
from phloem.config import ServerConfig
from phloem.server.engine_api import Engine


def serve(argv: Sequence[str]) -> int:
    """Serve until told to stop. Raises StartupError when the port, the memory or the model does not allow it."""
    args = parse_serve(argv)
    for warning in args.warnings:
        say(f"warning: {warning}")
    from phloem.engine.async_engine import AsyncEngine
    from phloem.server.serve import run_server

    progress = ProgressLine()

    def load() -> Engine:
        try:
            return AsyncEngine.load(args.engine, progress)
        finally:
            progress.close()

    def on_ready(engine: Engine, url: str) -> None:
        report_ready(engine, args.server, url)

    return run_server(args.server, load, on_ready, share_cache_across_keys=args.engine.share_cache_across_keys)


def report_ready(engine: Engine, server: ServerConfig, url: str) -> None:
    """Print what was loaded and that requests are taken now."""
    model = server.served_model_name.split(",")[0].strip() or engine.model_name
    for line in (*engine_facts(engine.describe()), *ready(url, model, bool(server.api_keys))):
        say(line)

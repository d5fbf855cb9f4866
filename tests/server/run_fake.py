"""A server process with a fake engine: what `phloem serve` does, without a model. Arguments are JSON."""

from __future__ import annotations

import json
import sys
import time

from phloem.config import ServerConfig
from phloem.errors import StartupError
from phloem.server.engine_api import Engine
from phloem.server.serve import run_server
from tests.server.fake_engine import FakeEngine


def main() -> int:
    options = json.loads(sys.argv[1])
    load_s = options.pop("load_s", 0.0)
    fail = options.pop("fail", "")
    config = ServerConfig(**options.pop("config", {}))
    text = options.pop("text", "Hello world")

    def load() -> Engine:
        time.sleep(load_s)
        if fail:
            raise StartupError(fail)
        return FakeEngine.saying(text, **options)

    def on_ready(_engine: Engine, url: str) -> None:
        print(f"ready on {url}", flush=True)

    try:
        return run_server(config, load, on_ready)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

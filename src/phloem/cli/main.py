"""The `phloem` program: picks the subcommand and turns errors into one line and an exit code.

Owns the names of the subcommands and the exit codes: 0 done, 1 failed at run time, 2 wrong usage, 130 interrupted,
141 nobody reads the output any more.
Each subcommand is a module of its own, imported when it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from phloem import __version__
from phloem.cli.flags import suggestion
from phloem.errors import PhloemError, StartupError, UsageError

USAGE = """\
usage: phloem COMMAND [...]

  serve [MODEL]    serve a model over HTTP, in the forms of the OpenAI API
  run [MODEL]      chat with a model in the terminal
  doctor [MODEL]   say what this machine can do, and what the model would reach
  bench NAME       measure: {benchmarks}
  version          print the version

MODEL is a .gguf file or a Hugging Face-format folder; absent, it is the small demo model.
`phloem COMMAND --help` shows the flags of a command."""

BENCHMARKS = ("serve", "table", "compare", "report", "peers", "sched", "tree", "kernels", "vs-llama")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except PhloemError as error:
        print(f"phloem: error: {error.message}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartupError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader had enough, as in `| head`; what Python flushes at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": lambda rest: int(import_module("phloem.cli.serve").serve(rest)),
        "run": lambda rest: int(import_module("phloem.cli.run").run(rest)),
        "doctor": lambda rest: int(import_module("phloem.cli.doctor").doctor(rest)),
        "bench": _bench,
        "version": _version,
        "help": _help,
    }
    if not words:
        raise UsageError("no command given (see phloem --help)")
    name, rest = words[0], words[1:]
    if name in ("-h", "--help"):
        return _help(rest)
    if name == "--version":
        return _version(rest)
    if name not in commands:
        raise UsageError(f"unknown command {name!r}{suggestion(name, commands)} (see phloem --help)")
    return commands[name](rest)


def _help(rest: list[str]) -> int:
    if rest:
        return _dispatch([rest[0], "--help"])
    print(USAGE.format(benchmarks=", ".join(BENCHMARKS)))
    return 0


def _version(rest: list[str]) -> int:
    if rest:
        raise UsageError(f"phloem version takes no arguments, got {rest[0]!r}")
    print(f"phloem {__version__}")
    return 0


def _bench(rest: list[str]) -> int:
    if not rest or rest[0] in ("-h", "--help"):
        print(f"usage: phloem bench {{{','.join(BENCHMARKS)}}} [...]")
        return 0 if rest else 2
    if rest[0] not in BENCHMARKS:
        raise UsageError(
            f"unknown benchmark {rest[0]!r}{suggestion(rest[0], BENCHMARKS)} (there are {', '.join(BENCHMARKS)})"
        )
    return int(import_module(f"phloem.bench.{rest[0].replace('-', '_')}").main(rest[1:]))

"""The `phloem` program: picks the subcommand. Owns names and exit codes; each subcommand has its own module."""

from __future__ import annotations

import sys

from phloem import __version__


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["version"]:
        print(f"phloem {__version__}")
        return 0
    print("usage: phloem version", file=sys.stderr)
    return 2

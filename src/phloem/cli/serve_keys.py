"""API keys of `phloem serve` that should not stand on a command line: from files and from the environment.

Owns their sources and what is said to a bad one. Must not know what a key allows, and never shows one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from phloem.errors import UsageError

KEYS_VARIABLE = "PHLOEM_API_KEY"
ADMIN_VARIABLE = "PHLOEM_ADMIN_API_KEY"


def add_key_flags(parser: argparse._ActionsContainer) -> None:
    """The flags beside `--api-key` and `--admin-api-key`."""
    parser.add_argument(
        "--api-key-file",
        action="append",
        default=[],
        metavar="FILE",
        help=f"File with keys that may generate, one a line; # starts a comment line. Or set {KEYS_VARIABLE}.",
    )
    parser.add_argument(
        "--admin-api-key-file",
        default="",
        metavar="FILE",
        help=f"File with the admin key. Or set {ADMIN_VARIABLE}.",
    )


def gather_keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, object]:
    """`api_keys` and `admin_api_key` of the server's configuration, from all sources together.

    Raises UsageError for a file that cannot be read or holds no key, and for admin keys that differ.
    """
    keys = list(getattr(arguments, "api_keys", ()))
    for path in arguments.api_key_file:
        keys += _keys_of_file("--api-key-file", path)
    keys += environment.get(KEYS_VARIABLE, "").split()
    admin = [arguments.admin_api_key] if hasattr(arguments, "admin_api_key") else []
    if "" in admin:
        raise UsageError("--admin-api-key is empty; give a key, or leave the flag out")
    if arguments.admin_api_key_file:
        admin += _keys_of_file("--admin-api-key-file", arguments.admin_api_key_file)
    admin += environment.get(ADMIN_VARIABLE, "").split()
    if len(set(admin)) > 1:
        sources = f"--admin-api-key, --admin-api-key-file, {ADMIN_VARIABLE}"
        raise UsageError(f"{len(set(admin))} different admin keys given ({sources}); give one")
    return {"api_keys": tuple(dict.fromkeys(keys)), "admin_api_key": admin[0] if admin else ""}


def _keys_of_file(flag: str, path: str) -> list[str]:
    """The keys of a file: its lines but for empty ones and comments."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"{flag} {path}: cannot read it ({reason}); give a text file with one key a line") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{flag} {path}: holds no key; give one a line, or leave the flag out")
    return keys

"""Flags of the command line: one per field of a config class, its type and help text read from the class.

Owns spellings: the aliases that users of other servers type, dash or underscore, and what is said to a flag that does
not exist. Must not know what any field does.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from phloem.errors import UsageError

Config = TypeVar("Config")

# Other servers' names for our fields. The field's own name, with dashes, is always a flag.
ALIASES: dict[str, tuple[str, ...]] = {
    "max_model_len": ("--context-length",),
    "mem_fraction_static": ("--gpu-memory-utilization",),
    "max_running_requests": ("--max-num-seqs",),
    "chunked_prefill_size": ("--max-num-batched-tokens",),
    "page_size": ("--block-size",),
    "schedule_policy": ("--scheduling-policy",),
    "eviction_policy": ("--radix-eviction-policy",),
    "num_threads": ("--threads",),
    "api_keys": ("--api-key",),
}

# Flags that guides for other servers show and that are not what their name says: what is done instead, and the word.
LRU_WARNING = "--schedule-policy lru: lru orders eviction, not scheduling; taken as --eviction-policy lru"
FLASHINFER_WARNING = "--enable-flashinfer is not needed: the attention backend is chosen by the device"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, takes no abbreviations and suggests the nearest flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")

    def parse_strict(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, with underscores in flag names read as dashes; UsageError on anything unknown."""
        arguments, unknown = self.parse_known_args([dashed(word) for word in argv])
        if unknown:
            word = next((w for w in unknown if w.startswith("-")), unknown[0])
            if not word.startswith("-"):
                raise UsageError(f"unexpected argument {word!r} (see {self.prog} --help)")
            known = [name for name in self._option_string_actions if name.startswith("--")]
            raise UsageError(
                f"unknown flag {flag_name(word)}{suggestion(flag_name(word), known)} (see {self.prog} --help)"
            )
        return arguments


def flag_name(word: str) -> str:
    """The name part of `--name=value`."""
    return word.split("=", 1)[0]


def dashed(word: str) -> str:
    """`--max_model_len=8` as `--max-model-len=8`; anything but a long flag unchanged."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean A or B?` for a mistyped or abbreviated name, else the empty string."""
    names = list(known)
    near = [name for name in names if name.startswith(word)]
    near += [name for name in difflib.get_close_matches(word, names, n=3, cutoff=0.6) if name not in near]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def modernise(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with misnamed flags of common guides put right, and one warning for each."""
    words, warnings = [], []
    index = 0
    while index < len(argv):
        word = dashed(argv[index])
        value = argv[index + 1] if index + 1 < len(argv) else ""
        if word == "--enable-flashinfer":
            warnings.append(FLASHINFER_WARNING)
        elif word == "--schedule-policy=lru" or (word == "--schedule-policy" and value == "lru"):
            warnings.append(LRU_WARNING)
            words.append("--eviction-policy=lru")
            index += word == "--schedule-policy"
        else:
            words.append(argv[index])
        index += 1
    return words, warnings


def field_docs(config: type) -> dict[str, str]:
    """Field name -> the string that stands under it in the source of a config class."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return docs


def add_flags(parser: argparse._ActionsContainer, config: type, skip: Iterable[str] = ()) -> None:
    """Add one flag per field of the dataclass `config`. A flag that is not given leaves no attribute behind."""
    hints = typing.get_type_hints(config)
    docs = field_docs(config)
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        names = ["--" + field.name.replace("_", "-"), *ALIASES.get(field.name, ())]
        shown = "" if field.default in ("", None, ()) else f" (default: {field.default})"
        help_text = (docs[field.name] + shown).replace("%", "%%")
        parser.add_argument(
            *names, dest=field.name, default=argparse.SUPPRESS, help=help_text, **_reading(hints[field.name])
        )


def _reading(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of a field's type."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    readers: dict[type, tuple[Callable[[str], object], str]] = {
        int: (int, "N"),
        float: (float, "X"),
        str: (str, "TEXT"),
    }
    reader, metavar = readers[kind]
    return {"type": reader, "metavar": metavar}


def build(config: type[Config], arguments: argparse.Namespace, **fixed: object) -> Config:
    """The config object from the flags that were given; UsageError names the flag whose value is out of range."""
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names} | fixed
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return config(**values)
    except UsageError as error:
        name, _, rest = error.message.partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {rest}" if name in names else error.message) from None

"""Rules of the source tree that a program can check: who imports whom, sizes, docstrings, words."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "phloem"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in {".cpp", ".h", ".hpp", ".inc"})
TEXTS = sorted(
    [*SOURCES, *NATIVE, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *ROOT.glob("*.md")]
    + [p for folder in ("scripts", "docs", "tests", "examples") for p in (ROOT / folder).rglob("*") if p.is_file()]
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# Which parts of the package a part may import, beside itself. Data flows one way:
#   server -> engine -> { sched -> kv } and { runner -> models -> kernels }
BASE = {"types", "errors", "config", ""}
MAY_IMPORT = {
    "": {"types", "config", "engine"},
    "errors": set(),
    "types": {"errors"},
    "config": {"errors"},
    "_tree": set(),
    "_kernels": set(),
    "kv": BASE | {"_tree"},
    "sched": BASE | {"kv"},
    "kernels": BASE | {"_kernels"},
    "models": BASE | {"kernels"},
    "runner": BASE | {"models", "kernels"},
    "engine": BASE | {"kv", "sched", "models", "runner"},
    "server": BASE | {"engine", "models"},
    "programs": BASE | {"engine"},
    "cli": BASE | {"engine", "server", "bench", "models", "kernels"},
    "bench": BASE | {"kv", "sched", "kernels", "models", "runner", "engine", "server"},
}
NO_TORCH = {"", "errors", "types", "config", "kv", "sched", "engine", "server", "programs", "cli"}
TORCH = {"torch", "transformers"}


def part_of(path: Path) -> str:
    """Name of the sub-package or top-level module that a source file belongs to; '' is phloem/__init__."""
    name = path.relative_to(PACKAGE).parts[0]
    return name.removesuffix(".py").removesuffix("__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of each import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the full name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def parts_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, module in imported_modules(tree_of(path)):
        names = module.split(".")
        if names[0] == "phloem":
            part = names[1] if len(names) > 1 and names[1] != "__version__" else ""
            yield line, part


def test_every_part_has_a_rule() -> None:
    assert {part_of(path) for path in SOURCES} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(path)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {own or 'phloem'} must not import {part}"
        for line, part in parts_imported(path)
        if part != own and part not in MAY_IMPORT[own]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_where_it_belongs(path: Path) -> None:
    if part_of(path) in NO_TORCH:
        wrong = [f"line {n}: {name}" for n, name in imported_modules(tree_of(path)) if name.split(".")[0] in TORCH]
        assert not wrong, f"{path.relative_to(ROOT)} imports torch: {wrong}"


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter that runs `code` with warnings as errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_server_loads_no_torch() -> None:
    """A fresh interpreter that imports all but the torch back end holds neither torch nor transformers."""
    modules = [
        ".".join(("phloem", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if path.name != "__main__.py" and not any(m.split(".")[0] in TORCH for _, m in imported_modules(tree_of(path)))
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print(sorted({TORCH!r} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{path.relative_to(ROOT)} must say what it owns and must not know"


@pytest.mark.parametrize("path", SOURCES + NATIVE, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_stay_short(path: Path) -> None:
    long = [
        f"{node.name} at line {node.lineno}: {length} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, f"{path.relative_to(ROOT)}: {long}"


# Written in pieces, so that this file passes its own test.
FORBIDDEN = re.compile(
    "|".join(
        [r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b", r"\bHA" + r"CK\b", "/work" + "/", "py" + r"pi\.org"]
    )
)


def test_no_forbidden_words() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        if path.suffix not in {".pyc", ".so", ".gguf", ".png", ".json"} and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not wrong, "\n".join(wrong)

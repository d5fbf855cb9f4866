"""From a path to a model: owns which kind of checkpoint a path is, and what must agree inside it.

Must not know runners or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from phloem.errors import CheckpointError, UsageError
from phloem.models.gguf_file import GgufFile
from phloem.models.spec import ModelSpec, spec_from_hf
from phloem.models.tokenizer import Tokenizer, read_json, tokenizer_from_folder, tokenizer_from_gguf
from phloem.models.weights import RawTensor, expected_shapes
from phloem.models.weights_gguf import read_gguf_spec, read_gguf_weights
from phloem.models.weights_safetensors import read_safetensors_weights


class LoadProgress(NamedTuple):
    """What loading is about to do, and the share of the steps that is done (0 to 1)."""

    stage: str
    share: float


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint, open: weights are mapped from their files and not yet read."""

    spec: ModelSpec
    weights: Mapping[str, RawTensor]
    tokenizer: Tokenizer
    name: str
    """File name without suffix, or folder name."""
    path: Path

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in their stored formats."""
        return sum(tensor.data.nbytes for tensor in self.weights.values())


def load_model(
    path: str | Path,
    *,
    max_len: int = 0,
    chat_template: str | None = None,
    dummy: bool = False,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadedModel:
    """Open a .gguf file or a Hugging Face-format folder.

    `max_len` is the context that will be served (0: the model's own); `chat_template` is the text of a template that
    replaces the model's; `dummy` makes random weights from the spec, and needs no weight files in a folder.
    Raises UsageError if there is nothing at `path` or `max_len` is more than the model can do, CheckpointError if
    what is there cannot be served.
    """
    path = Path(path)
    report = progress or (lambda _: None)
    if path.is_dir():
        return _load_folder(path, max_len, chat_template, dummy, report)
    if path.suffix == ".gguf" and path.is_file():
        return _load_gguf(path, max_len, chat_template, dummy, report)
    if not path.exists():
        raise UsageError(f"no model at {path}: expected a .gguf file or a Hugging Face-format folder")
    raise UsageError(f"{path} is no model: expected a .gguf file or a folder with config.json and .safetensors files")


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, RawTensor]:
    """Weights of the right shapes and a sensible scale (f16; norms are 1, biases 0): for benchmarks and tests."""
    rng = np.random.default_rng(seed)
    weights: dict[str, RawTensor] = {}
    for name, shape in expected_shapes(spec):
        if name.endswith("norm"):
            values = np.ones(shape, np.float32)
        elif name.endswith("_bias"):
            values = np.zeros(shape, np.float32)
        else:
            values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        if len(shape) == 1:
            weights[name] = RawTensor(name, shape, "f32", values.view(np.uint8).reshape(1, -1))
        else:
            weights[name] = RawTensor(name, shape, "f16", values.astype(np.float16).view(np.uint8))
    return weights


def _load_gguf(
    path: Path, max_len: int, chat_template: str | None, dummy: bool, report: Callable[[LoadProgress], None]
) -> LoadedModel:
    report(LoadProgress("reading the header", 0.0))
    file = GgufFile(path)
    spec = read_gguf_spec(file, max_len)
    report(LoadProgress("mapping the weights", 0.3))
    weights = random_weights(spec) if dummy else read_gguf_weights(file, spec)
    report(LoadProgress("building the tokenizer", 0.6))
    tokenizer = tokenizer_from_gguf(file.metadata, path.name, chat_template)
    return _agreeing(LoadedModel(spec, weights, tokenizer, path.stem, path), max_len, report)


def _load_folder(
    path: Path, max_len: int, chat_template: str | None, dummy: bool, report: Callable[[LoadProgress], None]
) -> LoadedModel:
    report(LoadProgress("reading the config", 0.0))
    if not (path / "config.json").is_file():
        ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}: give the path of that file" if ggufs else ""
        raise CheckpointError(f"{path}: config.json is missing{hint}")
    spec = spec_from_hf(read_json(path / "config.json"), f"{path.name}/config.json", max_len)
    report(LoadProgress("mapping the weights", 0.1))
    weights = random_weights(spec) if dummy else read_safetensors_weights(path, spec)
    report(LoadProgress("building the tokenizer", 0.4))
    tokenizer = tokenizer_from_folder(path, chat_template)
    return _agreeing(LoadedModel(spec, weights, tokenizer, path.resolve().name, path), max_len, report)


def _agreeing(model: LoadedModel, max_len: int, report: Callable[[LoadProgress], None]) -> LoadedModel:
    """Refuse a context that the rotary tables are not made for, and token ids that lie outside the embedding."""
    spec = model.spec
    stretched = int(spec.rope.original_max_position * spec.rope.factor) if spec.rope.kind == "yarn" else 0
    limit = max(spec.max_position_embeddings, stretched)
    if max_len > limit:
        raise UsageError(f"{model.path.name} is made for {limit} tokens, --max-model-len {max_len} is more")
    if model.tokenizer.vocab_size > model.spec.vocab_size:
        raise CheckpointError(
            f"{model.path.name}: the tokenizer has {model.tokenizer.vocab_size} tokens, but the weights only "
            f"{model.spec.vocab_size}: tokenizer and weights are of different models"
        )
    report(LoadProgress("done", 1.0))
    return model

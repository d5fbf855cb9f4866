"""RawTensor: one weight as the file stores it, and the names under which the engine knows weights.

Owns canonical names, block formats and the neutral tensor record. Must not know torch, kernels or file formats.

Canonical names (shapes are [out, in], Hugging Face layout, q and k in half-split RoPE order):

    embed [vocab, hidden]            head [vocab, hidden] (absent when tied)      final_norm [hidden]
    layers.{i}.attn_norm [hidden]    layers.{i}.mlp_norm [hidden]
    layers.{i}.q [heads * d, hidden]   .k [kv_heads * d, hidden]   .v [kv_heads * d, hidden]   .o [hidden, heads * d]
    layers.{i}.q_bias .k_bias .v_bias .o_bias    layers.{i}.q_norm [d]  .k_norm [d]
    layers.{i}.gate [inter, hidden]  .up [inter, hidden]  .down [hidden, inter]   .gate_bias .up_bias .down_bias
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phloem.errors import CheckpointError
from phloem.models.spec import ModelSpec
from phloem.types import Float32Array

TensorFormat = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]

BLOCK_SIZES: dict[TensorFormat, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Values and bytes of one block of each format."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A weight in its stored format: `data` is uint8 [rows, bytes per row], C-contiguous, possibly memory-mapped.

    Block formats (GGUF) lie along the last dimension, so rows can be permuted or cut freely.
    """

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a file format names tensors: those outside the layers (`top`), and `prefix`{layer}.{part}.weight or .bias.

    Both maps lead from the file's names to canonical ones.
    """

    prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str]

    def canonical(self, name: str, file_name: str) -> str:
        """Canonical name of a tensor called `name` in the file; CheckpointError for one that no model here has."""
        if name in self.top:
            return self.top[name]
        if name.startswith(self.prefix):
            layer, _, rest = name.removeprefix(self.prefix).partition(".")
            part, _, kind = rest.rpartition(".")
            if part in self.layer and kind == "weight":
                return f"layers.{layer}.{self.layer[part]}"
            if part in self.layer and kind == "bias" and not self.layer[part].endswith("_norm"):
                return f"layers.{layer}.{self.layer[part]}_bias"
        raise CheckpointError(f"{file_name}: unexpected tensor {name}: the model has parts that are not served")

    def in_file(self, name: str) -> str:
        """The file's name of the tensor with this canonical name."""
        for theirs, ours in self.top.items():
            if ours == name:
                return theirs
        _, layer, kind = name.split(".")
        part = next(theirs for theirs, ours in self.layer.items() if ours == kind.removesuffix("_bias"))
        return f"{self.prefix}{layer}.{part}.{'bias' if kind.endswith('_bias') else 'weight'}"


def dequantize(tensor: RawTensor) -> Float32Array:
    """The tensor's values as float32 of its shape. Cost: one pass; a view where the file has float32."""
    if tensor.format == "f32":
        values = tensor.data.view(np.float32)
    elif tensor.format == "f16":
        values = tensor.data.view(np.float16).astype(np.float32)
    elif tensor.format == "bf16":
        values = (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        import gguf  # slow to import, and needed for quantised weights alone

        kind = gguf.GGMLQuantizationType[tensor.format.upper()]
        values = np.asarray(gguf.quants.dequantize(tensor.data, kind), np.float32)
    return values.reshape(tensor.shape)


def expected_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every tensor that a model of this spec has, layer by layer."""
    hidden, inter, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * d, spec.num_kv_heads * d
    yield "embed", (spec.vocab_size, hidden)
    if not spec.tie_word_embeddings:
        yield "head", (spec.vocab_size, hidden)
    yield "final_norm", (hidden,)
    matrices = {
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "gate": (inter, hidden),
        "up": (inter, hidden),
        "down": (hidden, inter),
    }
    biased = ("q", "k", "v") * spec.qkv_bias + ("o",) * spec.out_bias + ("gate", "up", "down") * spec.mlp_bias
    for i in range(spec.num_layers):
        yield f"layers.{i}.attn_norm", (hidden,)
        yield f"layers.{i}.mlp_norm", (hidden,)
        for name, shape in matrices.items():
            yield f"layers.{i}.{name}", shape
        for name in biased:
            yield f"layers.{i}.{name}_bias", matrices[name][:1]
        for name in ("q_norm", "k_norm") * spec.qk_norm:
            yield f"layers.{i}.{name}", (d,)


def check_weights(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], file_name: Callable[[str], str], source: str
) -> None:
    """Raise CheckpointError unless `shapes` holds exactly the tensors of `spec`.

    `file_name` turns a canonical name into what the checkpoint calls it; `source` names the file in the messages.
    Stops at the first fault, so a spec of absurdly many layers costs nothing.
    """
    num_expected = 0
    for name, shape in expected_shapes(spec):
        num_expected += 1
        if name not in shapes:
            raise CheckpointError(
                f"{source}: tensor {file_name(name)} is missing (its metadata promise {spec.num_layers} layers)"
            )
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {file_name(name)} has the shape {list(shapes[name])}, expected {list(shape)}"
            )
    if num_expected < len(shapes):
        expected = {name for name, _ in expected_shapes(spec)}
        extra = [file_name(name) for name in shapes if name not in expected]
        raise CheckpointError(
            f"{source}: unexpected tensor {extra[0]} ({len(extra)} in all): the model has parts that its metadata "
            f"({spec.architecture}, {spec.num_layers} layers) do not tell of"
        )

"""GGUF files to canonical tensors: owns GGUF's tensor names and its row order of q and k.

Must not know torch or kernels. Nothing is converted: quantised blocks stay as they are, mapped from the file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phloem.errors import CheckpointError
from phloem.models.gguf_file import GgufFile
from phloem.models.spec import ModelSpec, spec_from_gguf
from phloem.models.weights import RawTensor, TensorNames, check_weights, dequantize

_NAMES = TensorNames(
    prefix="blk.",
    top={"token_embd.weight": "embed", "output.weight": "head", "output_norm.weight": "final_norm"},
    layer={
        "attn_norm": "attn_norm",
        "ffn_norm": "mlp_norm",
        "attn_q": "q",
        "attn_k": "k",
        "attn_v": "v",
        "attn_output": "o",
        "ffn_gate": "gate",
        "ffn_up": "up",
        "ffn_down": "down",
        "attn_q_norm": "q_norm",
        "attn_k_norm": "k_norm",
    },
)
_FREQ_FACTORS = "rope_freqs.weight"


def read_gguf_spec(file: GgufFile, max_len: int = 0) -> ModelSpec:
    """ModelSpec of a GGUF file; `max_len` and errors as in `spec_from_gguf`."""
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{file.path.name} is one part of a model split over {file.metadata['split.count']} files, which is not "
            "served; join them (llama-gguf-split --merge)"
        )
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    factors: tuple[float, ...] = ()
    if _FREQ_FACTORS in file.tensors:
        tensor = file.tensors[_FREQ_FACTORS]
        values = dequantize(RawTensor(tensor.name, tensor.shape, tensor.format, file.data(tensor)))
        factors = tuple(float(value) for value in values.reshape(-1))
        if not all(0.0 < value < 1e6 for value in factors):
            raise CheckpointError(f"{file.path.name}: tensor {_FREQ_FACTORS} must hold positive numbers")
    return spec_from_gguf(file.metadata, shapes, factors, file.path.name, max_len)


def read_gguf_weights(file: GgufFile, spec: ModelSpec) -> dict[str, RawTensor]:
    """All tensors of the model under their canonical names.

    Raises CheckpointError naming the first tensor that is missing, unexpected or of the wrong shape.
    """
    canonical = {name: _NAMES.canonical(name, file.path.name) for name in file.tensors if name != _FREQ_FACTORS}
    file_names = {ours: theirs for theirs, ours in canonical.items()}
    shapes = {ours: file.tensors[theirs].shape for ours, theirs in file_names.items()}
    check_weights(spec, shapes, _NAMES.in_file, file.path.name)
    weights: dict[str, RawTensor] = {}
    for ours, theirs in file_names.items():
        tensor = file.tensors[theirs]
        data = file.data(tensor)
        kind = ours.rpartition(".")[2]
        if spec.architecture == "llama" and kind in ("q", "k"):
            data = data[_half_split_rows(tensor.shape[0], spec.head_dim)]
        elif spec.architecture == "llama" and kind in ("q_bias", "k_bias"):
            order = _half_split_rows(tensor.shape[0], spec.head_dim)
            data = data.reshape(tensor.shape[0], -1)[order].reshape(1, -1)
        weights[ours] = RawTensor(ours, tensor.shape, tensor.format, data)
    return weights


def _half_split_rows(num_rows: int, head_dim: int) -> NDArray[np.intp]:
    """Row order that undoes GGUF's: it stores llama's q and k as neighbouring pairs, (x[2i], x[2i + 1])."""
    order = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)

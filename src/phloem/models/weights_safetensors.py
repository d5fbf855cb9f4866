"""safetensors to canonical tensors: owns the container's header, the shard index and Hugging Face's tensor names.

Must not know torch or kernels. Files are mapped, not read; headers are checked against the file's size before
anything is parsed. Pickle files (.bin, .pt) are never opened.

Source: the safetensors format description (huggingface/safetensors, README).
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phloem.errors import CheckpointError
from phloem.models.spec import ModelSpec
from phloem.models.weights import BLOCK_SIZES, RawTensor, TensorFormat, TensorNames, check_weights

_FORMATS: dict[str, TensorFormat] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MAX_HEADER = 100 << 20
HF_NAMES = TensorNames(
    prefix="model.layers.",
    top={"model.embed_tokens.weight": "embed", "lm_head.weight": "head", "model.norm.weight": "final_norm"},
    layer={
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    },
)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_safetensors_weights(folder: Path, spec: ModelSpec) -> dict[str, RawTensor]:
    """All tensors of the model in `folder` under their canonical names.

    With tied embeddings a stored lm_head.weight is left out: the config decides. Raises CheckpointError naming
    file and tensor if one is missing, unexpected, of the wrong shape, or its file is damaged or lies elsewhere.
    """
    weights: dict[str, RawTensor] = {}
    for path, wanted in _shards(folder):
        found = {tensor.name: tensor for tensor in read_safetensors(path)}
        for name in wanted if wanted is not None else found:
            if name not in found:
                raise CheckpointError(f"{path.name}: tensor {name} is missing, but {_INDEX} says it is there")
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings):
                continue
            tensor, ours = found[name], HF_NAMES.canonical(name, path.name)
            weights[ours] = RawTensor(ours, tensor.shape, tensor.format, tensor.data)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    check_weights(spec, shapes, HF_NAMES.in_file, folder.name)
    return weights


def read_safetensors(path: Path) -> Iterator[RawTensor]:
    """Tensors of one file, under the names it has for them.

    Raises CheckpointError if the file is no safetensors, is cut short, or its tensors overlap, leave gaps or do
    not fit their shapes.
    """
    entries, data = _open(path)
    placed: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        shape, form, start, end = _entry(path, name, entry, len(data))
        placed.append((start, end, name))
        block = data[start:end]
        if block.ctypes.data % BLOCK_SIZES[form][1]:
            block = block.copy()  # the format allows any offset; the arrays of numpy and the kernels do not
        yield RawTensor(name, shape, form, block.reshape(math.prod(shape[:-1]), -1))
    placed.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(placed):
        if start != end:
            what = "overlap" if start < end else "leave a gap between them"
            raise CheckpointError(f"{path.name}: tensors {first} and {second} {what}")
    if placed and (placed[0][0] != 0 or placed[-1][1] != len(data)):
        raise CheckpointError(f"{path.name}: its tensors take {placed[-1][1]} bytes, but it holds {len(data)}")


def _open(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.uint8]]]:
    """Header entries, and the bytes behind the header."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = path.stat().st_size
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                hint = "a Git LFS pointer" if start == b"version " else "cut short, or no safetensors file"
                raise CheckpointError(
                    f"{path.name}: a header of {length} bytes does not fit a file of {size}: it is {hint}; "
                    "fetch it again"
                )
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name}: {error.strerror or error}") from error
    try:
        header = json.loads(mapped[8 : 8 + length].tobytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: its header is no JSON object")
    header.pop("__metadata__", None)
    return header, mapped[8 + length :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _entry(path: Path, name: str, entry: Any, size: int) -> tuple[tuple[int, ...], TensorFormat, int, int]:
    """Shape, format and byte range of a header entry, checked."""
    where = f"{path.name}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is not described by an object")
    dtype = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if dtype not in _FORMATS:
        raise CheckpointError(f"{where} has the type {dtype!r}, which is not served; served are {', '.join(_FORMATS)}")
    if not _naturals(shape) or not shape or 0 in shape:
        raise CheckpointError(f"{where} has the shape {shape!r}, expected a list of positive integers")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has the data_offsets {offsets!r}, expected [begin, end]")
    form = _FORMATS[dtype]
    start, end = offsets
    num_bytes = math.prod(shape) * BLOCK_SIZES[form][1]
    if end - start != num_bytes:
        raise CheckpointError(f"{where} of shape {shape} needs {num_bytes} bytes, but its offsets give {end - start}")
    if end > size:
        raise CheckpointError(f"{where} ends at byte {end}, but the file holds {size}: it is cut short; fetch it again")
    return tuple(shape), form, start, end


def _naturals(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Files of the checkpoint, each with the tensors that the index expects in it (None: all of them)."""
    if not (folder / _INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
            found = f"; {pickles[0]} is a pickle, which could run code and is never opened" if pickles else ""
            raise CheckpointError(f"{folder.name}: neither {_SINGLE} nor {_INDEX} is there{found}")
        yield folder / _SINGLE, None
        return
    try:
        names = json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for tensor, file_name in names.items():
            by_file.setdefault(file_name, []).append(tensor)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder.name}/{_INDEX} is damaged: {error!r}") from error
    for file_name, tensors in by_file.items():
        if (
            not isinstance(file_name, str)
            or not file_name.endswith(".safetensors")
            or Path(file_name).name != file_name
            or "\0" in file_name
        ):
            raise CheckpointError(
                f"{_INDEX} names {file_name!r} for {tensors[0]}: expected a .safetensors file in the same folder"
            )
        if not (folder / file_name).is_file():
            raise CheckpointError(f"{folder.name}: {file_name} is missing; {_INDEX} wants {tensors[0]} from it")
        yield folder / file_name, tensors

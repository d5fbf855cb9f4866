"""Plain numpy twins of the packed formats and of the products, in float64; and small random models and plans."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem._kernels import PackedMatrix
from phloem.models.spec import ModelSpec, RopeSpec
from phloem.models.weights import RawTensor, expected_shapes
from phloem.types import LogitRow, SamplingParams, StepPlan

Float64Array = NDArray[np.float64]


def unpack(matrix: PackedMatrix) -> Float64Array:
    """Values [n, k] of a packed matrix, read from the layout that packing.h describes."""
    n, k = matrix.shape
    panels, groups = -(-n // 16), -(-k // 32)
    data = matrix.data().reshape(panels, -1)
    if matrix.format in ("f32", "f16", "bf16"):
        values = _floats(matrix.format, data).reshape(panels, groups * 32, 16)
        return values.transpose(0, 2, 1).reshape(panels * 16, -1)[:n, :k]
    data = data.reshape(panels, groups, -1)
    if matrix.format == "q8":
        codes = data[:, :, :512].view(np.int8).reshape(panels, groups, 8, 16, 4).transpose(0, 3, 1, 2, 4)
        scales = _floats("f16", data[:, :, 512:]).transpose(0, 2, 1)[..., None, None]
        return (codes * scales).reshape(panels * 16, -1)[:n, :k]
    pairs = data[:, :, :256].reshape(panels, groups, 4, 1, 16, 4)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=3).transpose(0, 4, 1, 2, 3, 5).astype(np.float64)
    d = _floats("f16", data[:, :, 256:288]).transpose(0, 2, 1)[..., None, None, None]
    if matrix.format == "q4":
        return (d * (codes - 8)).reshape(panels * 16, -1)[:n, :k]
    m = _floats("f16", data[:, :, 288:]).transpose(0, 2, 1)[..., None, None, None]
    return (d * codes + m).reshape(panels * 16, -1)[:n, :k]


def quantised_rows(x: NDArray[np.float32]) -> Float64Array:
    """What int8 activations with one scale per 32 keep of x [rows, k], outliers kept as floats."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, 32)
    ordered = np.sort(np.abs(groups), axis=2)
    largest, second = ordered[..., -1:], ordered[..., -2:-1]
    stands_out = (largest > 3 * second) & (largest > 1e-30)
    is_outlier = (np.abs(groups) == largest) & stands_out
    top = np.where(stands_out, second, largest)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-30)
    values = np.rint(np.where(is_outlier, 0, groups) * inverse).astype(np.float64) * (top * np.float32(1 / 127))
    values = np.where(is_outlier, groups, values)
    return values.reshape(rows, -1)[:, :k]


def random_spec(**changes: Any) -> ModelSpec:
    """A small model with sizes that are multiples of nothing."""
    sizes: dict[str, Any] = {
        "architecture": "qwen3",
        "vocab_size": 101,
        "hidden_size": 72,
        "intermediate_size": 88,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "rope": RopeSpec(),
        "max_position_embeddings": 1024,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
    }
    return ModelSpec(**(sizes | changes))


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, RawTensor]:
    """float32 weights whose outputs are of order one and far from symmetric."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(spec):
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + values * 0.2 if "norm" in name else values * np.float32(1.5 * shape[-1] ** -0.5)
        data = np.ascontiguousarray(values.reshape(-1, shape[-1])).view(np.uint8)
        weights[name] = RawTensor(name, shape, "f32", data)
    return weights


def step_plan(sequences: list[tuple[list[int], int, NDArray[np.int32]]], written: set[int] | None = None) -> StepPlan:
    """A plan of (tokens of the step, position of the first, slots of all positions) per sequence.

    Slots in `written` hold their K/V already; the plan asks for the logits of every row.
    """
    written = written or set()
    token_ids, positions, slots = [], [], []
    for tokens, first, table in sequences:
        token_ids += tokens
        positions += range(first, first + len(tokens))
        slots += [int(slot) for slot in table[first : first + len(tokens)]]
    write = np.array([-1 if slot in written else slot for slot in slots], np.int32)
    _, firsts = np.unique(write, return_index=True)
    repeated = np.ones(len(write), bool)
    repeated[firsts] = False
    write[repeated] = -1  # rows of one step that share a slot: the first writes it
    width = max(len(table) for _, _, table in sequences)
    tables = np.full((len(sequences), width), -1, np.int32)
    for row, (_, _, table) in enumerate(sequences):
        tables[row, : len(table)] = table
    params = SamplingParams(temperature=0)
    empty = np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        write_slots=write,
        seq_row_start=np.cumsum([0] + [len(tokens) for tokens, _, _ in sequences], dtype=np.int32),
        seq_table_row=np.arange(len(sequences), dtype=np.int32),
        slot_table=tables,
        logit_rows=[LogitRow(row, p + 1, 0, params, empty, 0) for row, p in enumerate(positions)],
    )


def _floats(form: str, data: NDArray[np.uint8]) -> Float64Array:
    data = np.ascontiguousarray(data)
    if form == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(np.float32 if form == "f32" else np.float16).astype(np.float64)

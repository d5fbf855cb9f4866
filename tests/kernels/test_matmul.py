"""Packed formats keep what they promise; products match float64 and do not depend on batch or threads."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from phloem._kernels import PackedMatrix, matmul, supported_isas
from phloem.models.weights import RawTensor, dequantize
from phloem.runner.packing import pack
from tests.kernels.reference import quantised_rows, unpack

SHAPES = [(1, 32), (16, 32), (17, 64), (50, 96), (33, 608)]
BLOCK_FORMATS = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
MAKERS = {"q8": "q8_0", "q4": "q4_0", "q4m": "q4_1"}


def stored(form: str, n: int, k: int, seed: int = 0) -> RawTensor:
    values = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) + np.float32(0.1)
    if form in ("f32", "f16"):
        data = values.astype(np.float32 if form == "f32" else np.float16).view(np.uint8)
    elif form == "bf16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        data = np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[form.upper()]))
    return RawTensor("layers.0.q", (n, k), form, np.ascontiguousarray(data))


def packed(form: str, n: int, k: int) -> PackedMatrix:
    return pack(stored(MAKERS.get(form, form), n, k), "none")


def product(matrix: PackedMatrix, x: np.ndarray, isa: str, threads: int = 1) -> np.ndarray:
    out = np.empty((len(x), matrix.shape[0]), np.float32)
    matmul(matrix, x, out, isa, threads)
    return out


def random_rows(rows: int, k: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)).astype(np.float32) * rng.uniform(0.1, 30, (rows, 1)).astype(np.float32)
    # A third of the groups have a value that stands out, as real activations do.
    for row, column in zip(*np.nonzero(rng.random((rows, k)) < 1 / 96), strict=True):
        x[row, column] *= 100
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_1", "f32", "f16", "bf16"])
def test_exact_formats_keep_every_value(form: str, shape: tuple[int, int]) -> None:
    tensor = stored(form, *shape)
    np.testing.assert_array_equal(unpack(pack(tensor, "none")), dequantize_exactly(tensor))


@pytest.mark.parametrize("form", ["f32", "f16", "bf16"])
def test_floats_stay_what_they_are_unless_asked(form: str) -> None:
    tensor = stored(form, 5, 64)
    assert (pack(tensor, None).format, pack(tensor, "q8").format, pack(tensor, "q4").format) == (form, "q8", "q4m")


def dequantize_exactly(tensor: RawTensor) -> np.ndarray:
    """float64 values: the float32 ones of `dequantize` round d * q + m."""
    if tensor.format != "q4_1":
        return dequantize(tensor).astype(np.float64)
    blocks = tensor.data.reshape(-1, 20)
    d, m = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float64) for at in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (d * codes + m).reshape(tensor.shape)


@pytest.mark.parametrize("form", ["f32", "bf16", "q5_0", "q5_1"])
def test_other_formats_become_q8_within_half_a_step(form: str) -> None:
    tensor = stored(form, 20, 96)
    matrix = pack(tensor, "q8")
    assert matrix.format == "q8"
    values = dequantize(tensor).reshape(20, 3, 32)
    step = np.abs(values).max(axis=2, keepdims=True) / 127
    assert (np.abs(unpack(matrix).reshape(20, 3, 32) - values) <= step * 0.51 + 1e-6).all()


def test_q4_k_keeps_its_values_but_for_the_rounding_of_scales() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 288), dtype=np.uint8)
    for at in (0, 144):
        scales = rng.uniform(0.001, 0.1, (6, 2)).astype(np.float16)
        data[:, at : at + 4] = scales.view(np.uint8)
    tensor = RawTensor("layers.0.q", (6, 512), "q4_k", data)
    matrix = pack(tensor, None)
    assert matrix.format == "q4m"
    values = dequantize(tensor)
    largest = np.abs(values).reshape(6, -1, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(unpack(matrix) - values) <= largest * 2**-9 + 1e-3).all()


def test_floats_as_q4_stay_within_half_a_step() -> None:
    tensor = stored("f32", 20, 96)
    matrix = pack(tensor, "q4")
    assert matrix.format == "q4m"
    values = dequantize(tensor).reshape(20, 3, 32)
    step = (values.max(axis=2, keepdims=True) - values.min(axis=2, keepdims=True)) / 15
    assert (np.abs(unpack(matrix).reshape(20, 3, 32) - values) <= step * 0.52 + 1e-3).all()
    assert pack(RawTensor("embed", (20, 96), "f32", tensor.data), "q4").format == "q8"


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("form", ["q8", "q4", "q4m", "f32", "f16", "bf16"])
def test_products_match_float64(form: str, isa: str) -> None:
    for n, k in SHAPES:
        matrix = packed(form, n, k)
        for rows in (1, 2, 3, 5, 33):
            x = random_rows(rows, k)
            exact_x = quantised_rows(x) if form.startswith("q") else x.astype(np.float64)
            weights = unpack(matrix)
            expected = exact_x @ weights.T
            bound = 2e-6 * (np.abs(exact_x) @ (np.abs(weights).T + 1)) + 1e-6
            # One code of one activation may round the other way where the product x * 127 / max is a tie.
            slack = np.abs(x).max() / 127 * np.abs(weights).max() * 1.01 if form.startswith("q") else 0.0
            error = np.abs(product(matrix, x, isa) - expected)
            assert (error <= bound + slack).all()
            assert (error <= bound).mean() > 0.9


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("form", ["q8", "q4", "q4m", "f32", "f16", "bf16"])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(form: str, isa: str) -> None:
    matrix = packed(form, 50, 352)
    x = random_rows(33, 352)
    alone = np.concatenate([product(matrix, x[i : i + 1], isa) for i in range(33)])
    for rows in range(1, 34):
        for threads in (1, 2) if rows in (1, 7, 33) else (1,):
            np.testing.assert_array_equal(product(matrix, x[:rows], isa, threads), alone[:rows])
    np.testing.assert_array_equal(product(matrix, x[11:], isa), alone[11:])


@pytest.mark.parametrize("isa", supported_isas())
def test_extreme_codes_do_not_saturate(isa: str) -> None:
    """All products of one sign at their largest: 16-bit partial sums must hold them."""
    for form, weight in (("q4_1", 15.0), ("q8_0", -127.0)):
        values = np.full((16, 64), weight, np.float32)
        values[:, ::32] = 0.0 if form == "q4_1" else weight
        tensor = RawTensor(
            "layers.0.q",
            (16, 64),
            form,
            np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[form.upper()])),
        )
        x = np.full((5, 64), -127.0, np.float32)
        expected = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
        np.testing.assert_allclose(product(pack(tensor, None), x, isa), expected, rtol=1e-6)


def test_wrong_calls_are_refused() -> None:
    matrix = PackedMatrix("q8", 16, 64)
    with pytest.raises(ValueError, match="cannot pack q4_0 as q8"):
        matrix.fill(0, "q4_0", np.zeros((16, 36), np.uint8))
    with pytest.raises(ValueError, match="expected 68 bytes per row, got 70"):
        matrix.fill(0, "q8_0", np.zeros((16, 70), np.uint8))
    with pytest.raises(ValueError, match="rows out of range"):
        matrix.fill(1, "q8_0", np.zeros((16, 68), np.uint8))
    with pytest.raises(ValueError, match="unknown packed format"):
        PackedMatrix("q3", 16, 64)
    with pytest.raises(ValueError, match="not served here"):
        product(matrix, np.zeros((1, 64), np.float32), "mmx")
    with pytest.raises(ValueError, match="bytes, got"):
        PackedMatrix.over("q8", 16, 64, np.zeros(100, np.uint8))


def test_a_matrix_over_packed_bytes_is_the_same_matrix() -> None:
    matrix = packed("q4m", 50, 96)
    again = PackedMatrix.over("q4m", 50, 96, matrix.data().copy())
    np.testing.assert_array_equal(unpack(again), unpack(matrix))
    with pytest.raises(ValueError, match="read-only"):
        again.fill(0, "q4_1", np.zeros((1, 60), np.uint8))

"""Weights of both containers: every format, q and k in the right order, and every fault named."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phloem.errors import CheckpointError
from phloem.models.gguf_file import GgufFile
from phloem.models.spec import ModelSpec, spec_from_hf
from phloem.models.tokenizer import read_json
from phloem.models.weights import BLOCK_SIZES, RawTensor, TensorFormat, dequantize, expected_shapes
from phloem.models.weights_gguf import read_gguf_spec, read_gguf_weights
from phloem.models.weights_safetensors import read_safetensors, read_safetensors_weights
from tests.helpers.models import hf_model, write_gguf


def spec_of(folder: Path) -> ModelSpec:
    return spec_from_hf(read_json(folder / "config.json"))


def load_folder(folder: Path) -> dict[str, RawTensor]:
    return read_safetensors_weights(folder, spec_of(folder))


def load_gguf(path: Path) -> dict[str, RawTensor]:
    file = GgufFile(path)
    return read_gguf_weights(file, read_gguf_spec(file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    return tmp_path


@pytest.mark.parametrize("form", BLOCK_SIZES)
def test_dequantize_equals_the_gguf_package(form: TensorFormat, rng: np.random.Generator) -> None:
    """Random blocks whose scales are finite numbers; the package's answer is taken row by row."""
    values, num_bytes = BLOCK_SIZES[form]
    rows = rng.integers(0, 256, (6, 3 * num_bytes), np.uint8)
    if form not in ("f32", "f16", "bf16"):
        scales = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}.get(form, (0, 2) if form.endswith("_1") else (0,))
        blocks = rows.reshape(6, 3, num_bytes)
        for place in scales:
            blocks[:, :, place : place + 2] = rng.standard_normal((6, 3, 1)).astype(np.float16).view(np.uint8)
    else:
        rows = rng.standard_normal((6, 3)).astype(np.float32).view(np.uint8)[:, : 3 * num_bytes].copy()
        if form == "f16":
            rows = rng.standard_normal((6, 3)).astype(np.float16).view(np.uint8)
    got = dequantize(RawTensor("t", (6, 3 * values), form, rows))
    assert got.shape == (6, 3 * values)
    assert got.dtype == np.float32
    kind = gguf.GGMLQuantizationType[form.upper()]
    np.testing.assert_array_equal(got, np.stack([gguf.quants.dequantize(row, kind) for row in rows]))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_containers_hold_the_same_tensors(architecture: str, tmp_path: Path) -> None:
    """GGUF stores llama's q and k as pairs; under the canonical names both must be in half-split order."""
    model = hf_model(architecture, **({"attention_bias": True} if architecture == "llama" else {}))
    model.save_pretrained(tmp_path)
    plain, packed = load_folder(tmp_path), load_gguf(write_gguf(model, tmp_path / "m.gguf"))
    assert plain.keys() == packed.keys() == {name for name, _ in expected_shapes(spec_of(tmp_path))}
    for name, tensor in plain.items():
        np.testing.assert_array_equal(dequantize(tensor), dequantize(packed[name]), err_msg=name)
        assert packed[name].data.flags.c_contiguous
        assert packed[name].data.dtype == np.uint8


def test_rows_of_quantised_q_move_as_whole_rows(tmp_path: Path) -> None:
    model = hf_model("llama")
    packed = load_gguf(write_gguf(model, tmp_path / "m.gguf", "Q8_0"))["layers.0.q"]
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.quantize(model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy(), kind)
    np.testing.assert_array_equal(packed.data, expected)


def test_tied_heads(tmp_path: Path) -> None:
    model = hf_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "head" not in load_folder(tmp_path)
    assert "head" not in load_gguf(write_gguf(model, tmp_path / "m.gguf"))
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"lm_head.weight": torch.ones(320, 64)}, tmp_path / "model.safetensors")
    assert "head" not in load_folder(tmp_path), "the config says tied, and the config decides"
    save_file(state, tmp_path / "model.safetensors")
    untied = spec_from_hf(read_json(tmp_path / "config.json") | {"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        read_safetensors_weights(tmp_path, untied)


def test_sharded_equals_single(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("sharded")
    hf_model("llama").save_pretrained(other, max_shard_size="100KB")
    one, many = load_folder(folder), load_folder(other)
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor.data, many[name].data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_folders(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hf_model("qwen2").to(dtype)
    model.save_pretrained(tmp_path)
    weights = load_folder(tmp_path)
    assert weights["layers.1.v"].format == {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    expected = model.state_dict()["model.layers.1.self_attn.v_proj.weight"].float().numpy()
    np.testing.assert_array_equal(dequantize(weights["layers.1.v"]), expected)


def rewrite(path: Path, change: Any) -> None:
    state = load_file(path)
    path.unlink()
    change(state)
    save_file(state, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (lambda s: s.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (
            lambda s: s.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
            "unexpected tensor model.layers.2.mlp.up_proj.weight",
        ),
        (lambda s: s.update({"model.layers.0.moe.w": torch.ones(4)}), "unexpected tensor model.layers.0.moe.w"),
        (
            lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "unexpected tensor model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}),
            "tensor model.layers.0.self_attn.k_proj.weight has the shape [64, 64], expected [32, 64]",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "tensor model.norm.weight has the type 'I8'",
        ),
    ],
)
def test_a_folder_whose_tensors_do_not_fit_is_refused(folder: Path, change: Any, message: str) -> None:
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        load_folder(folder)
    assert message in str(error.value)


def test_rotary_buffers_of_old_checkpoints_are_left_out(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(folder / "model.safetensors", lambda s: s.update(extra))
    load_folder(folder)


def test_a_missing_shard_or_tensor_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    name = next(iter(load_file(shard)))
    rewrite(shard, lambda s: s.pop(name))
    with pytest.raises(CheckpointError, match=f"{shard.name}: tensor {name} is missing"):
        load_folder(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_folder(sharded)


@pytest.mark.parametrize(
    "file_name",
    [
        "../../etc/hostname",
        "/etc/hostname",
        "../x.safetensors",
        "a/b.safetensors",
        "pytorch_model.bin",
        "x\0.safetensors",
        "",
    ],
)
def test_an_index_cannot_leave_its_folder(sharded: Path, file_name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["model.norm.weight"] = file_name
    index.write_text(json.dumps(described))
    with pytest.raises(
        CheckpointError, match=r"for model\.norm\.weight: expected a \.safetensors file in the same folder"
    ):
        load_folder(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_a_damaged_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_folder(sharded)


class Bomb:
    """Unpickling this creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    marker = folder / "pwned"
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    load_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{name} is a pickle"):
        load_folder(folder)
    assert not marker.exists()


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes does not fit"),
        (b"\0" * 64, "a header of 0 bytes does not fit"),
        (b"<!DOCTYPE html><html>not found</html>", "no safetensors file"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (container({}, length=1 << 60), "a header of 1152921504606846976 bytes does not fit"),
        (container({}, length=(1 << 64) - 1), "does not fit"),
        (container(b"{nonsense"), "its header is damaged"),
        (container(b"[" * 100_000), "its header is damaged"),
        (container(b"[]"), "is no JSON object"),
        (container(b'{"a":1,"a":2}'), "a name occurs twice"),
        (container({"t": 5}), "tensor t is not described"),
        (container({"t": entry(dtype="I64")}), "tensor t has the type 'I64'"),
        (container({"t": entry(shape=[])}, bytes(16)), "tensor t has the shape"),
        (container({"t": entry(shape=[-4])}, bytes(16)), "tensor t has the shape"),
        (container({"t": entry(shape=[4.0])}, bytes(16)), "tensor t has the shape"),
        (container({"t": entry(shape=[True])}, bytes(16)), "tensor t has the shape"),
        (container({"t": entry(shape=[1] * 1000)}, bytes(16)), "tensor t has the shape"),
        (container({"t": entry(shape=[1 << 62, 4])}, bytes(16)), "tensor t of shape"),
        (container({"t": entry(offsets=[0])}, bytes(16)), "tensor t has the data_offsets"),
        (container({"t": entry(offsets=[16, 0])}, bytes(16)), "its offsets give -16"),
        (container({"t": entry()}, bytes(8)), "tensor t ends at byte 16, but the file holds 8"),
        (container({"t": entry(offsets=[1 << 60, (1 << 60) + 16])}, bytes(16)), "tensor t ends at byte"),
        (container({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24)), "tensors a and b overlap"),
        (container({"a": entry(), "b": entry()}, bytes(16)), "tensors a and b overlap"),
        (container({"a": entry(), "b": entry(offsets=[20, 36])}, bytes(36)), "a and b leave a gap"),
        (container({"a": entry()}, bytes(20)), "its tensors take 16 bytes, but it holds 20"),
    ],
)
def test_a_damaged_or_hostile_safetensors_file_is_refused_at_once(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        list(read_safetensors(path))
    assert message in str(error.value)
    assert path.name in str(error.value)
    assert time.monotonic() - start < 1


def test_an_odd_header_length_costs_a_copy_and_no_error(tmp_path: Path) -> None:
    header = json.dumps({"t": entry()}).encode()
    header += b" " * (3 - len(header) % 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(container(header, np.arange(4, dtype=np.float32).tobytes()))
    (tensor,) = read_safetensors(path)
    assert dequantize(tensor).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("skip", "metadata", "message"),
    [
        (["blk.1.ffn_down.weight"], {}, "tensor blk.1.ffn_down.weight is missing"),
        (["output_norm.weight"], {}, "tensor output_norm.weight is missing"),
        (["token_embd.weight"], {}, "token_embd.weight is missing"),
        ([], {"split.count": 3}, "one part of a model split over 3 files"),
        ([], {"llama.block_count": 5}, "tensor blk.2.attn_norm.weight is missing (its metadata promise 5 layers)"),
        ([], {"llama.block_count": 1}, "unexpected tensor blk.1."),
        (
            [],
            {"llama.feed_forward_length": 128},
            "tensor blk.0.ffn_gate.weight has the shape [96, 64], expected [128, 64]",
        ),
        (
            [],
            {"llama.attention.head_count_kv": 4},
            "tensor blk.0.attn_k.weight has the shape [32, 64], expected [64, 64]",
        ),
    ],
)
def test_a_gguf_whose_tensors_do_not_fit_is_refused(
    skip: list[str], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "m.gguf", metadata=metadata, skip=skip)
    with pytest.raises(CheckpointError) as error:
        load_gguf(path)
    assert message in str(error.value)
    assert "m.gguf" in str(error.value)


def test_gguf_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    model = hf_model("llama", attention_bias=True, mlp_bias=True)
    weights = load_gguf(write_gguf(model, tmp_path / "m.gguf"))
    expected = model.state_dict()["model.layers.0.self_attn.k_proj.bias"].numpy()
    np.testing.assert_array_equal(dequantize(weights["layers.0.k_bias"]), expected)


def test_rope_freqs_of_a_gguf_reach_the_spec(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 4.0, 8, dtype=np.float32)
    path = write_gguf(hf_model("llama"), tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    file = GgufFile(path)
    spec = read_gguf_spec(file)
    assert spec.rope.freq_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in read_gguf_weights(file, spec)
    bad = write_gguf(hf_model("llama"), tmp_path / "bad.gguf", extra={"rope_freqs.weight": factors * np.nan})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold positive numbers"):
        read_gguf_spec(GgufFile(bad))

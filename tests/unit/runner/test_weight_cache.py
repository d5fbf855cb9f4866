"""Packed weights on disk: the same matrices again, and no wrong file is ever believed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from phloem.bench.kernels import prefill_plan
from phloem.config import EngineConfig
from phloem.engine.loading import load_parts
from phloem.kernels.native import PackedMatrix
from phloem.models.load import LoadedModel, load_model
from phloem.models.weights import RawTensor
from phloem.runner import packing, weight_cache
from phloem.runner.native_runner import NativeRunner
from phloem.runner.weight_cache import WeightCache
from tests.helpers.models import hf_model, save_folder, write_gguf


class Packer:
    """Packs the matrices of a model, and counts how often."""

    def __init__(self, model: LoadedModel) -> None:
        self.matrices = {name: tensor for name, tensor in model.weights.items() if len(tensor.shape) == 2}
        self.count = 0

    def __call__(self) -> Iterator[PackedMatrix]:
        self.count += 1
        yield from (packing.pack(tensor, None) for tensor in self.matrices.values())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(hf_model("llama"), tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def get(folder: Path, source: Path) -> tuple[list[PackedMatrix] | None, int]:
    """What the cache gives for a checkpoint, and how often it was packed for that."""
    packer = Packer(load_model(source))
    return WeightCache(folder, source).get(packer.matrices, None, "portable", packer), packer.count


def same(found: list[PackedMatrix] | None, source: Path) -> bool:
    fresh = list(Packer(load_model(source))())
    assert found is not None
    return all(
        a.format == b.format and a.shape == b.shape and np.array_equal(a.data(), b.data())
        for a, b in zip(found, fresh, strict=True)
    )


def test_the_second_start_maps_what_the_first_wrote(folder: Path, source: Path) -> None:
    first, count = get(folder, source)
    assert count == 1
    second, count = get(folder, source)
    assert count == 0
    assert same(first, source)
    assert same(second, source)
    assert len(list(folder.iterdir())) == 1


def test_mapped_weights_give_the_same_logits(folder: Path, source: Path) -> None:
    model = load_model(source)
    plain = NativeRunner(model.spec, model.weights, num_slots=16)
    cached = [
        NativeRunner(model.spec, model.weights, num_slots=16, weight_cache=WeightCache(folder, source))
        for _ in range(2)
    ]
    plan = prefill_plan(np.array([1, 2, 3], np.int32), 0)
    for runner in cached:
        assert np.array_equal(runner.logits(plan), plain.logits(plan))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def leave_the_head(file: Path) -> None:
    os.truncate(file, 4096)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def swap_two_blocks(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:])


@pytest.mark.parametrize("damage", [truncate, leave_the_head, flip_a_bit, swap_two_blocks])
def test_a_damaged_file_is_written_again(
    folder: Path, source: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    get(folder, source)
    (file,) = folder.iterdir()
    right = file.read_bytes()
    damage(file)
    assert file.read_bytes() != right
    found, count = get(folder, source)
    assert count == 1
    assert same(found, source)
    assert file.read_bytes() == right
    assert "it is written again" in caplog.text


def test_a_file_of_another_form_is_written_again(folder: Path, source: Path) -> None:
    get(folder, source)
    (file,) = folder.iterdir()
    right = file.read_bytes()
    for other in (b"", b"x" * 10000):
        file.write_bytes(other)
        assert get(folder, source)[1] == 1
        assert file.read_bytes() == right


def test_a_change_of_the_checkpoint_is_seen(folder: Path, source: Path) -> None:
    get(folder, source)
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert get(folder, source)[1] == 1
    # The same size and time, other weights.
    status = source.stat()
    write_gguf(hf_model("llama", seed=1), source)
    assert source.stat().st_size == status.st_size
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    found, count = get(folder, source)
    assert count == 1
    assert same(found, source)
    assert len(list(folder.iterdir())) == 1, "a model has one file, whatever it was before"


def test_a_folder_of_safetensors_has_its_files_watched(folder: Path, tmp_path: Path) -> None:
    source = save_folder(hf_model("llama"), tmp_path / "model")
    assert [get(folder, source)[1] for _ in range(2)] == [1, 0]
    (weights,) = source.glob("*.safetensors")
    os.utime(weights, (1, 1))
    assert [get(folder, source)[1] for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("what", ["library", "packing", "isa", "quantization"])
def test_other_code_or_settings_are_other_bytes(
    folder: Path, source: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(folder, source)
    changed = tmp_path / "changed"
    changed.write_text("other code")
    if what == "library":
        monkeypatch.setattr(weight_cache, "LIBRARY", str(changed))
    if what == "packing":
        monkeypatch.setattr(packing, "__file__", str(changed))
    packer = Packer(load_model(source))
    isa = "avx2" if what == "isa" else "portable"
    WeightCache(folder, source).get(packer.matrices, "q8" if what == "quantization" else None, isa, packer)
    assert packer.count == 1


def test_a_file_where_the_folder_should_be(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    found, _ = get(tmp_path / "cache", source)
    assert found is None
    assert "packed weights cannot be kept in" in caplog.text


def test_a_full_disk(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(source.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    model = load_model(source)
    runner = NativeRunner(model.spec, model.weights, num_slots=16, weight_cache=WeightCache(folder, source))
    assert runner.logits(prefill_plan(np.array([1, 2, 3], np.int32), 0)).shape[0] == 1
    assert list(folder.iterdir()) == []
    assert "MiB free there" in caplog.text


def test_a_write_that_fails_leaves_nothing(folder: Path, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    def pack() -> Iterator[PackedMatrix]:
        yield packing.pack(next(iter(Packer(load_model(source)).matrices.values())), None)
        raise OSError(28, "No space left on device")

    matrices: dict[str, RawTensor] = Packer(load_model(source)).matrices
    assert WeightCache(folder, source).get(matrices, None, "portable", pack) is None
    assert list(folder.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_what_a_killed_start_left_is_cleared(folder: Path, source: Path) -> None:
    get(folder, source)
    (file,) = folder.iterdir()
    old, new = (folder / f"{file.name}.{name}" for name in ("old", "new"))
    for left in (old, new):
        left.touch()
    os.utime(old, (1, 1))
    file.unlink()
    get(folder, source)
    assert sorted(folder.iterdir()) == [file, new]


@pytest.mark.parametrize(("setting", "place"), [(None, "home/phloem"), ("there", "there"), ("", "")])
def test_the_engine_keeps_them_where_it_is_told(
    source: Path,
    tmp_path: Path,
    setting: str | None,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    stages: list[str] = []
    for _ in range(2):
        load_parts(
            EngineConfig(str(source), max_total_tokens=64, weight_cache_dir=setting),
            lambda stage, _: stages.append(stage),
        ).runner.close()
    written = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("*.packed")}
    assert written == ({place} if place else set())
    assert stages.count("reading the header") == 2
    num_matrices = len(Packer(load_model(source)).matrices)
    assert stages.count("packing the weights") == num_matrices * (1 if place else 2)
    assert caplog.text == ""


def test_dummy_weights_are_not_kept(source: Path, cache_home: Path, tmp_path: Path) -> None:
    config = EngineConfig(str(source), load_format="dummy", max_total_tokens=64, weight_cache_dir=str(tmp_path / "c"))
    load_parts(config).runner.close()
    assert not (tmp_path / "c").exists()

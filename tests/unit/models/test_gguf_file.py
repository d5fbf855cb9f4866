"""The GGUF container: what a sound file gives, and that no damaged or hostile one is believed."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.errors import CheckpointError
from phloem.models.gguf_file import GgufFile
from tests.helpers.models import hf_model, write_gguf

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


def key(name: bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def image(keys: list[bytes] = [], tensors: list[bytes] = [], data: bytes = bytes(64), **head: Any) -> bytes:  # noqa: B006
    """A whole file: header, padding to 32, data."""
    counts = (head.get("num_tensors", len(tensors)), head.get("num_keys", len(keys)))
    header = head.get("magic", b"GGUF") + struct.pack("<IQQ", head.get("version", 3), *counts)
    header += b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def open_image(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_a_sound_file_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(hf_model("qwen3"), tmp_path / "m.gguf", "Q8_0", {"x.f": 1.5, "x.b": True, "x.a": [1, 2, 3]})
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.metadata["x.f"] == 1.5
    assert ours.metadata["x.b"] is True
    assert list(ours.metadata["x.a"]) == [1, 2, 3]
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
    assert list(ours.tensors) == [item.name for item in theirs.tensors]
    for item in theirs.tensors:
        mine = ours.tensors[item.name]
        assert mine.shape == tuple(int(n) for n in reversed(item.shape))
        assert ours.data(mine).tobytes() == item.data.tobytes()
        assert not ours.data(mine).flags.writeable


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file"),
    "html": (b"<html><body>404</body></html>", "is no GGUF file"),
    "git lfs pointer": (b"version https://git-lfs.example/spec/v1\noid sha256:0", "is no GGUF file"),
    "magic only": (b"GGUF", "the header needs 4 bytes"),
    "version 1": (image(version=1), "GGUF version 1 is not served"),
    "version 99": (image(version=99), "GGUF version 99 is not served"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "too many tensors": (image(num_tensors=1 << 60), "do not fit a header"),
    "too many keys": (image(num_keys=1 << 63), "do not fit a header"),
    "endless key": (image([text(b"k", 1 << 60)]), "has a name of 1152921504606846976 bytes"),
    "endless string": (image([key(b"k", STRING, text(b"v", (1 << 64) - 1))]), "metadata key 'k' needs 18446744073709"),
    "endless array": (image([key(b"k", ARRAY, struct.pack("<IQ", U32, 1 << 60))]), "'k' has 1152921504606846976"),
    "array beyond the end": (image([key(b"k", ARRAY, struct.pack("<IQ", U64, 4000))]), "'k' needs 32000 bytes"),
    "strings beyond the end": (image([key(b"k", ARRAY, struct.pack("<IQ", STRING, 4000))]), "'k' needs"),
    "string in array too long": (
        image([key(b"k", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"a") + text(b"b", 1 << 50))]),
        "'k' needs",
    ),
    "nested array": (image([key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "nested value type 9"),
    "unknown type": (image([key(b"k", 77, b"")]), "unknown value type 77"),
    "same key twice": (image([key(b"k", U32, bytes(4))] * 2), "metadata key 'k' occurs twice"),
    "same tensor twice": (image([], [tensor(b"t", [4])] * 2), "tensor 't' occurs twice"),
    "no dimensions": (image([], [tensor(b"t", [])]), "tensor 't' has 0 dimensions"),
    "empty tensor": (image([], [tensor(b"t", [0, 4])]), "tensor 't' has the shape [0, 4]"),
    "rows not of whole blocks": (image([], [tensor(b"t", [33], 8)]), "expected rows of a multiple of 32"),
    "unknown tensor type": (image([], [tensor(b"t", [256], 16)]), "tensor 't' has the type 16"),
    "size that wraps 64 bits": (image([], [tensor(b"t", [(1 << 42) + 1, 1 << 22])]), "tensor 't' of shape"),
    "size that wraps to a little": (image([], [tensor(b"t", [1 << 62, 4])]), "tensor 't' of shape"),
    "offset beyond the end": (image([], [tensor(b"t", [4], 0, 1 << 40)]), "tensor 't' needs 16 bytes at"),
    "offset that wraps": (image([], [tensor(b"t", [4], 0, (1 << 64) - 32)]), "tensor 't' needs 16 bytes at"),
    "misaligned offset": (image([], [tensor(b"t", [4], 0, 4)]), "tensor 't' lies at offset 4"),
    "overlap": (
        image([], [tensor(b"a", [16]), tensor(b"b", [4], 0, 32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "cut short": (image([], [tensor(b"t", [64])]), "tensor 't' of shape"),
    "alignment 0": (image([key(b"general.alignment", U32, bytes(4))]), "general.alignment must be a power of two"),
    "alignment 3": (image([key(b"general.alignment", U32, struct.pack("<I", 3))]), "general.alignment must be"),
    "alignment text": (image([key(b"general.alignment", STRING, text(b"x"))]), "general.alignment must be"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_or_hostile_header_is_refused_at_once(name: str, tmp_path: Path) -> None:
    content, message = CASES[name]
    start = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        open_image(tmp_path, content)
    assert message in str(error.value)
    assert "model.gguf" in str(error.value)
    assert time.monotonic() - start < 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(hf_model("llama"), tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_change_of_bytes_gives_anything_but_an_error_or_a_file(
    data: st.DataObject, sound: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(sound[: data.draw(st.integers(0, len(sound)))] if data.draw(st.booleans()) else sound)
    if content:
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, min(len(content) - 1, 20_000)))
            content[place : place + 8] = data.draw(
                st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)]))
            )
    path = tmp_path_factory.getbasetemp() / "mutant.gguf"
    path.unlink(missing_ok=True)  # a mapped file must not be written over
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except CheckpointError:
        return
    for item in file.tensors.values():
        assert file.data(item).nbytes == item.num_bytes

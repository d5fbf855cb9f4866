"""The GGUF container: owns its header, its limits and the memory map of one file.

Must not know what a model is: metadata values and byte ranges of tensors, checked against the file's size before
anything is read or allocated, since a header may be damaged or hostile.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.errors import CheckpointError
from phloem.models.weights import BLOCK_SIZES, TensorFormat

_FORMATS: dict[int, TensorFormat] = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    30: "bf16",
}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1 << 22
_MAX_NAME = 1 << 12
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` is [out, in] (the reverse of the file's order), `start` a byte in the file."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    start: int
    num_bytes: int


class GgufFile:
    """One memory-mapped GGUF file: `metadata`, and `tensors` by name.

    Raises CheckpointError, naming file and key or tensor, if the header is no GGUF, is cut short or
    contradicts itself: string or array longer than the file, duplicate names, sizes that overflow, offsets that are
    misaligned, overlap or lie outside the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        header = _Header(self._bytes, path)
        num_tensors = header.open()
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GgufTensor] = header.tensors(num_tensors)

    def data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [rows, bytes per row], read-only and backed by the file."""
        rows = math.prod(tensor.shape[:-1])
        return self._bytes[tensor.start : tensor.start + tensor.num_bytes].reshape(rows, -1)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise CheckpointError(f"{path.name} is no GGUF file: expected it to begin with 'GGUF', got {magic!r}")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class _Header:
    """A cursor over the header; every read is checked against the end of the file first."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.buffer = data.data
        self.name = path.name
        self.at = 4
        self.what = "the header"
        self.metadata: dict[str, Any] = {}

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {message}")

    def need(self, count: int) -> int:
        """Return the present place and step over `count` bytes."""
        start = self.at
        if count > len(self.buffer) - start:
            raise self.fail(
                f"{self.what} needs {count} bytes at {start}, but the file ends at {len(self.buffer)}; "
                "it is cut short or damaged: fetch it again"
            )
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.buffer, self.need(struct.calcsize(code)))[0]

    def text(self, limit: int | None = None) -> str:
        size = self.scalar("<Q")
        if limit is not None and size > limit:
            raise self.fail(f"{self.what} has a name of {size} bytes, expected at most {limit}; the file is damaged")
        start = self.need(size)
        return str(self.buffer[start : start + size], "utf-8", "replace")

    def open(self) -> int:
        """Read version, counts and metadata; return the number of tensors."""
        version = self.scalar("<I")
        if version & 0xFFFF == 0:
            raise self.fail("the file is big-endian; expected a little-endian GGUF")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not served; expected 2 or 3 (convert the model again)")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        left = len(self.buffer) - self.at
        if num_tensors * 24 + num_keys * 13 > left:
            raise self.fail(f"{num_tensors} tensors and {num_keys} keys do not fit a header of at most {left} bytes")
        for i in range(num_keys):
            self.what = f"metadata key {i}"
            key = self.text(_MAX_NAME)
            self.what = f"metadata key {key!r}"
            if key in self.metadata:
                raise self.fail(f"{self.what} occurs twice")
            self.metadata[key] = self.value(self.scalar("<I"))
        return int(num_tensors)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.fail(f"{self.what} has the unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        """A list of str, or a numpy array of numbers."""
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > _MAX_ARRAY:
            raise self.fail(f"{self.what} has {count} entries, expected at most {_MAX_ARRAY}")
        if kind == _STRING:
            return self.texts(count)
        if kind not in _SCALARS:
            raise self.fail(f"{self.what} is an array of the unknown or nested value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.buffer, dtype, count, self.need(count * dtype.itemsize))

    def texts(self, count: int) -> list[str]:
        """`count` strings. A vocabulary has hundreds of thousands, so the loop is kept bare."""
        buffer, at, end = self.buffer, self.at, len(self.buffer)
        read_size = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + read_size(buffer, at)[0] if start <= end else end + 1
            if at > end:
                self.need(at - self.at)
            values.append(str(buffer[start:at], "utf-8", "replace"))
        self.at = at
        return values

    def tensors(self, count: int) -> dict[str, GgufTensor]:
        """Read the tensor table and check every byte range."""
        entries: dict[str, tuple[tuple[int, ...], TensorFormat, int, int]] = {}
        for i in range(count):
            self.what = f"tensor {i}"
            name = self.text(_MAX_NAME)
            self.what = f"tensor {name!r}"
            if name in entries:
                raise self.fail(f"{self.what} occurs twice")
            num_dims = self.scalar("<I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self.fail(f"{self.what} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
            dims = [self.scalar("<Q") for _ in range(num_dims)]
            kind, offset = self.scalar("<I"), self.scalar("<Q")
            entries[name] = (tuple(reversed(dims)), *self.size(dims, kind), offset)
        return self.place(entries)

    def size(self, dims: list[int], kind: int) -> tuple[TensorFormat, int]:
        """Format and bytes of a tensor; Python integers do not wrap around."""
        if kind not in _FORMATS:
            raise self.fail(f"{self.what} has the type {kind}, which is not served; served are {_served()}")
        block, block_bytes = BLOCK_SIZES[_FORMATS[kind]]
        elements = math.prod(dims)
        if elements == 0 or dims[0] % block:
            raise self.fail(f"{self.what} has the shape {dims}, expected rows of a multiple of {block} values")
        num_bytes = elements // block * block_bytes
        if num_bytes > len(self.buffer):
            raise self.fail(
                f"{self.what} of shape {dims} needs {num_bytes} bytes, but the file has {len(self.buffer)} in all; "
                "it is cut short or damaged: fetch it again"
            )
        return _FORMATS[kind], num_bytes

    def place(self, entries: dict[str, tuple[tuple[int, ...], TensorFormat, int, int]]) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fail(f"general.alignment must be a power of two up to 2^20, got {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, (shape, form, num_bytes, offset) in entries.items():
            self.what = f"tensor {name!r}"
            if offset % alignment:
                raise self.fail(f"{self.what} lies at offset {offset}, expected a multiple of {alignment}")
            self.at = base + offset
            self.need(num_bytes)
            tensors[name] = GgufTensor(name, shape, form, base + offset, num_bytes)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in itertools.pairwise(ordered):
            if first.start + first.num_bytes > second.start:
                raise self.fail(f"tensors {first.name!r} and {second.name!r} overlap")
        return tensors


def _served() -> str:
    return ", ".join(f"{form.upper()} ({kind})" for kind, form in _FORMATS.items())

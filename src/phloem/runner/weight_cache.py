"""Packed weights on disk between starts: one file per model, mapped into memory while it is still right.

Owns the file's form and when it counts. Must not know layers or the command line. A file may be deleted at any time;
one that is out of date, cut short or damaged is written again; a folder that cannot be written costs a warning.

A file is a block of 4096 bytes (magic, identity, digest of the rest), then the matrices in the checkpoint's order, each
from a multiple of 4096 on. Their places follow from their shapes, so none are stored and none need be believed.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phloem.config import Quantization
from phloem.kernels.native import LIBRARY, PackedMatrix
from phloem.models.weights import RawTensor
from phloem.runner import packing

logger = logging.getLogger(__name__)

_MAGIC = b"phloem packed weights\n"
_BLOCK = 4096
_SUMMED_AT_ONCE = 16 << 20
_SPARE_BYTES = 1 << 30
_ABANDONED_S = 3600.0

Shape = tuple[str, int, int]
"""Packed format, rows, columns."""


class WeightCache:
    """The file in `folder` that belongs to the checkpoint at `source`."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._folder = folder
        self._source = source.resolve()

    def get(
        self,
        matrices: Mapping[str, RawTensor],
        quantization: Quantization | None,
        isa: str,
        pack: Callable[[], Iterable[PackedMatrix]],
    ) -> list[PackedMatrix] | None:
        """The packed matrices over the mapped file, which is written first where it is missing or not right.

        `pack` makes them in order; it is called at most once. None, after a warning, where nothing can be kept.
        """
        key = hashlib.blake2b(f"{self._source}\n{quantization}".encode(), digest_size=8).hexdigest()
        path = self._folder / f"{self._source.stem}-{key}.packed"
        shapes = [_shape(tensor, quantization) for tensor in matrices.values()]
        try:
            identity = identify(self._source, matrices, f"{isa} {shapes}")
            found = _read(path, identity, shapes)
            if found is None:
                _write(path, identity, shapes, pack())
                found = _read(path, identity, shapes)
        except OSError as error:
            logger.warning("packed weights cannot be kept in %s (%s): each start packs them", self._folder, error)
            return None
        return found


def identify(source: Path, matrices: Mapping[str, RawTensor], form: str) -> bytes:
    """Digest of what decides the packed bytes, found without reading the whole checkpoint.

    Of the checkpoint: sizes and times of its files, and the first 4096 bytes of every matrix. Of the code: the native
    module and the choice of formats themselves, so there is no version number to forget. And `form`.
    """
    digest = hashlib.blake2b(form.encode(), digest_size=32)
    for file in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for name, tensor in matrices.items():
        digest.update(f"{name} {tensor.format} {tensor.shape}\n".encode())
        digest.update(tensor.data.reshape(-1)[:_BLOCK].tobytes())
    for code in (LIBRARY, packing.__file__):
        digest.update(Path(code).read_bytes())
    return digest.digest()


def _read(path: Path, identity: bytes, shapes: Sequence[Shape]) -> list[PackedMatrix] | None:
    """The matrices of a file that is whole and has this identity, else None. Raises OSError if it cannot be read."""
    sizes = [_num_bytes(shape) for shape in shapes]
    try:
        with path.open("rb") as file:
            head = file.read(_BLOCK)
            if not head.startswith(_MAGIC + identity):
                return None
            if os.fstat(file.fileno()).st_size != _BLOCK + sum(map(_padded, sizes)):
                logger.warning("%s is cut short; it is written again", path)
                return None
            payload = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[_BLOCK:]
    except FileNotFoundError:
        return None
    if not head.startswith(_MAGIC + identity + _digest(payload)):
        logger.warning("%s is damaged; it is written again", path)
        return None
    matrices, start = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        matrices.append(PackedMatrix.over(*shape, payload[start : start + size]))
        start += _padded(size)
    return matrices


def _write(path: Path, identity: bytes, shapes: Sequence[Shape], matrices: Iterable[PackedMatrix]) -> None:
    """Write beside `path` and rename: whoever maps an older file keeps it. Holds few matrices at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()
    total, free = sum(_padded(_num_bytes(shape)) for shape in shapes), shutil.disk_usage(path.parent).free
    if free < total + _SPARE_BYTES:
        raise OSError(f"they take {total >> 20} MiB of the {free >> 20} MiB free there")
    number, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(number, "r+b") as file:
            for matrix in matrices:
                file.seek(_padded(file.tell()) or _BLOCK)
                file.write(matrix.data().data)
            file.truncate(_BLOCK + total)
            payload = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[_BLOCK:]
            file.seek(0)
            file.write(_MAGIC + identity + _digest(payload))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _digest(payload: NDArray[np.uint8]) -> bytes:
    """Hash of the sums of each 4096 bytes as 64-bit words: as fast as memory, and finds what disks and cuts do."""
    digest = hashlib.blake2b(digest_size=32)
    for start in range(0, len(payload), _SUMMED_AT_ONCE):
        words = payload[start : start + _SUMMED_AT_ONCE].view(np.uint64).reshape(-1, _BLOCK // 8)
        digest.update(words.sum(axis=1))
    return digest.digest()


def _shape(tensor: RawTensor, quantization: Quantization | None) -> Shape:
    n, k = tensor.shape
    return packing.packed_format(tensor, quantization), n, k


def _num_bytes(shape: Shape) -> int:
    return PackedMatrix(*shape).nbytes


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK

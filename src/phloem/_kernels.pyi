"""Types of the native kernels (native/kernels/module.cpp). Wrong shapes or values raise ValueError or TypeError."""

import numpy as np
from numpy.typing import NDArray

class PackedMatrix:
    """A weight matrix [n, k] in the kernels' layout; format is q4, q4m, q8, f16, bf16 or f32."""

    def __init__(self, format: str, n: int, k: int) -> None: ...
    @staticmethod
    def over(format: str, n: int, k: int, data: NDArray[np.uint8]) -> PackedMatrix:
        """A read-only matrix over packed bytes [nbytes], which it keeps alive."""

    def fill(self, row_begin: int, source: str, data: NDArray[np.uint8]) -> None:
        """Pack stored rows, uint8 [rows, bytes per row]; source is q8_0, q4_0, q4_1, f32, f16 or bf16."""

    def data(self) -> NDArray[np.uint8]:
        """The packed bytes, read-only, without a copy."""

    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...

class Decoder:
    """Weights, KV cache and forward pass of one decoder-only transformer."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        activation: str,
        kv_cache_dtype: str,
        num_slots: int,
        num_threads: int,
        group_shared_prefixes: bool,
        isa: str,
    ) -> None: ...
    def set_matrix(self, name: str, matrix: PackedMatrix) -> None: ...
    def set_vector(self, name: str, values: NDArray[np.float32]) -> None: ...
    def set_rope(self, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None: ...
    def step(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        write_slots: NDArray[np.int32],
        seq_row_start: NDArray[np.int32],
        seq_table_row: NDArray[np.int32],
        slot_table: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        hidden_rows: NDArray[np.int32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """One forward pass without the GIL; fills logits [logit rows, >= padded_vocab] and, where both are given,
        hidden [hidden rows, >= padded_hidden] with states after the final norm. Checks before it writes."""

    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def padded_vocab(self) -> int: ...
    @property
    def padded_hidden(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...

def supported_isas() -> list[str]:
    """Instruction sets that this CPU can run, plainest first."""

def matmul(matrix: PackedMatrix, x: NDArray[np.float32], out: NDArray[np.float32], isa: str, num_threads: int) -> None:
    """out [rows, n] = x [rows, k] times the matrix transposed, as a step computes it."""

def time_matmul(matrix: PackedMatrix, rows: int, repeats: int, isa: str, num_threads: int) -> float:
    """Median seconds of one product of random rows."""

def measure_bandwidth(num_threads: int) -> float:
    """Bytes per second read from memory beyond every cache."""

def measure_peak(isa: str, num_threads: int) -> float:
    """Integer operations per second of the plainest loop in registers: the ceiling of quantised products."""

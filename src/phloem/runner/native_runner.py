"""NativeRunner: a StepPlan through the native decoder, one call per step, and back to a StepResult.

Owns the native decoder with its KV cache. Must not know the cache's policy or how requests are ordered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from phloem.config import Isa, KVCacheDtype, Quantization
from phloem.errors import CheckpointError, StepFailedError, UsageError
from phloem.kernels.native import Decoder, PackedMatrix, supported_isas
from phloem.models.rope import rope_tables
from phloem.models.spec import ModelSpec
from phloem.models.weights import RawTensor, dequantize
from phloem.runner.packing import pack
from phloem.runner.sampler import sample
from phloem.runner.weight_cache import WeightCache
from phloem.types import Float32Array, StepPlan, StepResult


class NativeRunner:
    """ModelRunner on the native CPU kernels (see `phloem.types.ModelRunner`).

    Results depend on a row's token prefix, the weights and the instruction set alone: not on batch, chunks, threads,
    slots or `group_shared_prefixes`. `num_threads` 0 takes one per core this process may use; `max_len` is the longest
    sequence in tokens (0: the model's own limit); `weight_cache` keeps packed weights between starts; `progress` is
    told the share of weights that is packed.
    Raises UsageError for an instruction set that this CPU lacks, CheckpointError for shapes that are not served.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, RawTensor],
        *,
        num_slots: int,
        kv_cache_dtype: KVCacheDtype = "f16",
        num_threads: int = 0,
        isa: Isa = "auto",
        group_shared_prefixes: bool = True,
        quantization: Quantization | None = None,
        max_len: int = 0,
        weight_cache: WeightCache | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if isa != "auto" and isa not in supported_isas():
            raise UsageError(f"isa {isa} is not available: this CPU runs {', '.join(supported_isas())}")
        self.spec = spec
        self._kv_cache_dtype = kv_cache_dtype
        try:
            self._decoder = Decoder(
                vocab_size=spec.vocab_size,
                hidden_size=spec.hidden_size,
                intermediate_size=spec.intermediate_size,
                num_layers=spec.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                rms_norm_eps=spec.rms_norm_eps,
                activation=spec.activation,
                kv_cache_dtype=kv_cache_dtype,
                num_slots=num_slots,
                num_threads=num_threads or len(os.sched_getaffinity(0)),
                group_shared_prefixes=group_shared_prefixes,
                isa=isa,
            )
            self._load(weights, quantization, weight_cache, progress or (lambda _share: None))
        except ValueError as error:
            raise CheckpointError(
                f"the native kernels do not serve this model: {error}; --backend torch may, in float32 and slowly"
            ) from error
        tables = rope_tables(spec.rope, spec.head_dim, max_len or spec.max_position_embeddings)
        self._decoder.set_rope(tables.cos, tables.sin)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def step(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and draw the tokens of `plan.logit_rows`."""
        logits, hidden = self._forward(plan)
        return StepResult(plan.step_id, *sample(logits, plan.logit_rows), hidden)

    def logits(self, plan: StepPlan) -> Float32Array:
        """Run one forward pass; float32 [number of logit rows, vocab]."""
        return self._forward(plan)[0]

    def _forward(self, plan: StepPlan) -> tuple[Float32Array, Float32Array]:
        """Logits of the plan's logit rows and hidden states of its hidden rows."""
        logit_rows = np.array([row.row for row in plan.logit_rows], np.int32)
        logits = np.empty((len(logit_rows), self._decoder.padded_vocab), np.float32)
        hidden = np.empty((len(plan.hidden_rows), self._decoder.padded_hidden), np.float32)
        try:
            self._decoder.step(
                plan.token_ids,
                plan.positions,
                plan.write_slots,
                plan.seq_row_start,
                plan.seq_table_row,
                plan.slot_table,
                logit_rows,
                logits,
                plan.hidden_rows,
                hidden,
            )
        except (ValueError, MemoryError) as error:
            raise StepFailedError(f"step {plan.step_id} was refused: {error}") from error
        return logits[:, : self.spec.vocab_size], hidden[:, : self.spec.hidden_size]

    def close(self) -> None:
        """Release weights, K/V and threads; the runner cannot be used afterwards."""
        del self._decoder

    def describe(self) -> dict[str, object]:
        """What runs here: isa, num_threads, weight_bytes, kv_bytes_per_token, kv_cache_dtype, weight_formats."""
        return {
            "isa": self._decoder.isa,
            "num_threads": self._decoder.num_threads,
            "weight_bytes": self._decoder.weight_bytes,
            "kv_bytes_per_token": self._decoder.kv_bytes_per_token,
            "kv_cache_dtype": self._kv_cache_dtype,
            "weight_formats": sorted(self._formats),
        }

    def _load(
        self,
        weights: Mapping[str, RawTensor],
        quantization: Quantization | None,
        cache: WeightCache | None,
        progress: Callable[[float], None],
    ) -> None:
        matrices = {name: tensor for name, tensor in weights.items() if len(tensor.shape) == 2}

        def packed() -> Iterator[PackedMatrix]:
            total, done = sum(tensor.data.nbytes for tensor in matrices.values()), 0
            # Packing runs without the GIL, so plain threads share it out.
            with ThreadPoolExecutor(self._decoder.num_threads) as executor:
                made = executor.map(lambda tensor: pack(tensor, quantization), matrices.values())
                for tensor, matrix in zip(matrices.values(), made, strict=True):
                    done += tensor.data.nbytes
                    progress(done / total)
                    yield matrix

        kept = cache.get(matrices, quantization, self._decoder.isa, packed) if cache else None
        self._formats: set[str] = set()
        for name, matrix in zip(matrices, kept or packed(), strict=True):
            self._formats.add(matrix.format)
            self._decoder.set_matrix(name, matrix)
        for name, tensor in weights.items():
            if len(tensor.shape) == 1:
                self._decoder.set_vector(name, np.ascontiguousarray(dequantize(tensor)))

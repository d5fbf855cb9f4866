"""TorchRunner: a StepPlan to tensors, the torch forward pass, and back to a StepResult.

Owns the K/V tensors and the weights on their device. Must not know the cache's policy or how requests are ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phloem.models.decoder import Decoder, PagedKV, Rows
from phloem.models.spec import ModelSpec
from phloem.models.weights import RawTensor
from phloem.runner.kv_buffers import KVDtype, allocate_kv
from phloem.runner.sampler import sample
from phloem.types import Float32Array, StepPlan, StepResult

_DTYPES = {"f16": torch.float16, "f32": torch.float32}


class TorchRunner:
    """ModelRunner on torch (see `phloem.types.ModelRunner`).

    `max_len` is the longest sequence in tokens (0: the model's own limit). On CPU the K/V arrays are shared with
    numpy (`kv`), so that tests can look into them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, RawTensor],
        num_slots: int,
        *,
        max_len: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_dtype: KVDtype = "f32",
    ) -> None:
        self.spec = spec
        self._decoder = Decoder(spec, weights, max_len or spec.max_position_embeddings, device, dtype)
        if self._decoder.device.type == "cpu":
            buffers = allocate_kv(spec, num_slots, kv_dtype)
            self.kv = PagedKV(torch.from_numpy(buffers.k), torch.from_numpy(buffers.v))
        else:
            shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
            self.kv = PagedKV(
                torch.zeros(shape, dtype=_DTYPES[kv_dtype], device=device),
                torch.zeros(shape, dtype=_DTYPES[kv_dtype], device=device),
            )

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def step(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and draw the tokens of `plan.logit_rows`."""
        logits, hidden = self._forward(plan)
        return StepResult(plan.step_id, *sample(logits, plan.logit_rows), hidden)

    def logits(self, plan: StepPlan) -> Float32Array:
        """Run one forward pass; float32 [number of logit rows, vocab] on the host."""
        return self._forward(plan)[0]

    def _forward(self, plan: StepPlan) -> tuple[Float32Array, Float32Array]:
        """Logits of the plan's logit rows and hidden states of its hidden rows, on the host."""
        hidden = self._decoder.forward(self._rows(plan), self.kv)
        wanted = self._index(np.array([row.row for row in plan.logit_rows], np.int64))
        logits: Float32Array = self._decoder.logits(hidden[wanted]).cpu().numpy()
        states: Float32Array = self._decoder.final_norm(hidden[self._index(plan.hidden_rows)]).cpu().numpy()
        return logits, states

    def close(self) -> None:
        """Release weights and K/V; the runner cannot be used afterwards."""
        del self._decoder, self.kv

    def _rows(self, plan: StepPlan) -> Rows:
        bounds = plan.seq_row_start.tolist()
        written = np.flatnonzero(plan.write_slots >= 0)
        context = []
        for s, table_row in enumerate(plan.seq_table_row.tolist()):
            length = int(plan.positions[bounds[s + 1] - 1]) + 1
            context.append(self._index(plan.slot_table[table_row, :length]))
        return Rows(
            token_ids=self._index(plan.token_ids),
            positions=self._index(plan.positions),
            written=self._index(written),
            write_slots=self._index(plan.write_slots[written]),
            bounds=bounds,
            context=context,
        )

    def _index(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._decoder.device)

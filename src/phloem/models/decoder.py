"""One decoder-only transformer in torch, driven by ModelSpec: the oracle on CPU and the forward pass on GPU.

Owns the arithmetic of the Llama family over paged K/V. Must not know files, requests or the cache: rows, slots and
tables go in, hidden states come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from phloem.models.rope import rope_tables
from phloem.models.spec import Activation, ModelSpec
from phloem.models.weights import RawTensor, dequantize


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V, each [num_layers, num_slots, num_kv_heads, head_dim], of any floating dtype."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass; all index tensors are int64 on the model's device.

    Row `written[j]` stores its K/V in slot `write_slots[j]`. Sequence s holds the rows from bounds[s] to
    bounds[s + 1], which have consecutive positions; `context[s]` are the slots of positions 0 to its last.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    written: torch.Tensor
    write_slots: torch.Tensor
    bounds: list[int]
    context: list[torch.Tensor]


class Decoder:
    """Weights on a device, and the forward pass over them.

    `dtype` is that of weights and activations; norms, softmax, rotary and logits are float32 throughout.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, RawTensor],
        max_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = dtype
        self._weights = {
            name: torch.tensor(dequantize(tensor)).to(self.device, torch.float32 if "norm" in name else dtype)
            for name, tensor in weights.items()
        }
        tables = rope_tables(spec.rope, spec.head_dim, max_len)
        self._cos = torch.from_numpy(tables.cos).to(self.device)
        self._sin = torch.from_numpy(tables.sin).to(self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, kv: PagedKV) -> torch.Tensor:
        """Hidden states [R, hidden] before the final norm; writes K/V of the rows into `kv`."""
        cos, sin = self._cos[rows.positions][:, None], self._sin[rows.positions][:, None]
        x = self._weights["embed"][rows.token_ids]
        for layer in range(self.spec.num_layers):
            name = f"layers.{layer}."
            x = x + self._attention(name, layer, self._norm(x, name + "attn_norm"), (cos, sin), rows, kv)
            x = x + self._mlp(name, self._norm(x, name + "mlp_norm"))
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden] as `forward` returns them."""
        head = self._weights["embed" if self.spec.tie_word_embeddings else "head"]
        return functional.linear(self._norm(hidden, "final_norm"), head).float()

    @torch.inference_mode()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden] after the final norm."""
        return self._norm(hidden, "final_norm").float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name], self._weights.get(name + "_bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return (scaled * self._weights[name]).to(self.dtype)

    def _attention(
        self,
        name: str,
        layer: int,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        kv: PagedKV,
    ) -> torch.Tensor:
        spec = self.spec
        q = self._linear(x, name + "q").view(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(x, name + "k").view(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(x, name + "v").view(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(q, name + "q_norm"), self._norm(k, name + "k_norm")
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        # All rows write before any attends: sequences of one step may read each other's slots.
        kv.k[layer, rows.write_slots] = k[rows.written].to(kv.k.dtype)
        kv.v[layer, rows.write_slots] = v[rows.written].to(kv.v.dtype)
        out = torch.empty_like(q)
        for s, slots in enumerate(rows.context):
            low, high = rows.bounds[s], rows.bounds[s + 1]
            out[low:high] = attend(q[low:high], kv.k[layer, slots], kv.v[layer, slots])
        return self._linear(out.view(len(x), -1), name + "o")

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = activate(self._linear(x, name + "gate"), self.spec.activation)
        return self._linear(gate * self._linear(x, name + "up"), name + "down")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [R, heads, d] by tables [R, 1, d / 2], half-split layout, in float32."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last R of T positions: q [R, heads, d], k and v [T, kv_heads, d] -> [R, heads, d]."""
    num_rows, num_heads, d = q.shape
    length, num_kv_heads, _ = k.shape
    grouped = q.view(num_rows, num_kv_heads, -1, d).permute(1, 2, 0, 3)  # [kv_heads, group, R, d]
    keys = k.to(q.dtype).permute(1, 2, 0)[:, None]  # [kv_heads, 1, d, T]
    values = v.to(q.dtype).permute(1, 0, 2)[:, None]
    scores = (grouped @ keys).float() * d**-0.5
    if num_rows > 1:
        last = torch.arange(length - num_rows, length, device=q.device)
        hidden = torch.arange(length, device=q.device)[None] > last[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    return (weights @ values).permute(2, 0, 1, 3).reshape(num_rows, num_heads, d)


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """The gate's activation function."""
    if kind == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

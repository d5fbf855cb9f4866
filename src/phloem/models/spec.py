"""ModelSpec: what a decoder-only transformer is, read from a checkpoint.

Owns architecture names and their peculiarities: the only file that knows them. Must not know torch, kernels or
how weights are stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from phloem.errors import CheckpointError

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Served architectures, as `model_type` of config.json and as `general.architecture` of GGUF (SmolLM is llama)."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, half-split ("rotate half") layout: pair i is (x[i], x[i + head_dim / 2]).

    Sources: RoFormer (Su et al. 2021); YaRN (Peng et al. 2023); the llama3 rule of Llama 3.1's release. `dynamic`
    equals `default` up to the length that the model was trained for, and is served up to there only.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """YaRN's factor on cos and sin; 0: derived as 0.1 ln(factor) + 1."""
    truncate: bool = True
    """YaRN: round the bounds of its ramp outwards to whole pairs."""
    freq_factors: tuple[float, ...] = ()
    """Divisors of the head_dim / 2 frequencies that a checkpoint stores (GGUF: rope_freqs.weight); empty: none."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and switches of one decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices (biases and norms left out)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * (attention + mlp) + heads * self.vocab_size * self.hidden_size


class _Reader:
    """Typed access to a metadata mapping; every complaint names the source and the key."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def fail(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.prefix}{key} must be {expected}, got {self.get(key)!r}")

    def count(self, key: str, high: int, default: int | None = None, low: int = 1) -> int:
        """Return an integer from `low` to `high`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def optional(self, key: str) -> int:
        """Return an integer of at least 0, which is also what an absent one gives."""
        return self.count(key, 1 << 40, 0, 0)

    def word(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty if absent."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping, empty if absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return dict(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value


def spec_from_hf(config: Mapping[str, Any], source: str = "config.json", max_len: int = 0) -> ModelSpec:
    """Read the spec from a parsed config.json, as transformers 4 or 5 writes it.

    `max_len` is the context that will be served (0: all that the model has): a sliding window of at least that
    many tokens changes nothing and is accepted. Raises CheckpointError naming the key that is wrong or not served.
    """
    read = _Reader(config, source)
    architecture = _architecture(config.get("model_type"), source, "model_type")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if read.optional(key):
            raise CheckpointError(f"{source}: {key} = {config[key]}: mixture-of-experts models are not served")
    quantization = read.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise CheckpointError(
            f"{source}: weights quantised by {method!r} are not served; use the full-precision safetensors or a GGUF"
        )
    classes = read.words("architectures")
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        raise CheckpointError(f"{source}: {classes[0]} is no language model; expected an architecture ...ForCausalLM")
    activation = _ACTIVATIONS.get(read.word("hidden_act", "silu"))
    if activation is None:
        raise read.fail("hidden_act", f"one of {', '.join(_ACTIVATIONS)}")
    num_heads = read.count("num_attention_heads", 1 << 14)
    hidden_size = read.count("hidden_size", 1 << 20)
    max_position = read.count("max_position_embeddings", 1 << 30)
    attention_bias = read.flag("attention_bias", False)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=read.count("vocab_size", 1 << 24),
        hidden_size=hidden_size,
        intermediate_size=read.count("intermediate_size", 1 << 22),
        num_layers=read.count("num_hidden_layers", 1 << 12),
        num_heads=num_heads,
        num_kv_heads=read.count("num_key_value_heads", 1 << 14, 8 if architecture == "mistral" else num_heads),
        head_dim=read.count("head_dim", 1 << 12, 128 if architecture == "qwen3" else hidden_size // num_heads),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_hf_rope(read, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or attention_bias,
        out_bias=attention_bias and architecture != "qwen2",
        mlp_bias=read.flag("mlp_bias", False) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        activation=activation,
    )
    _refuse_window(_hf_window(read, architecture), max_len or max_position, source, "sliding_window")
    return _checked(spec, source)


def spec_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    freq_factors: tuple[float, ...] = (),
    source: str = "GGUF",
    max_len: int = 0,
) -> ModelSpec:
    """Read the spec from GGUF metadata and the shapes ([out, in]) of its tensors.

    `freq_factors` is the content of the tensor rope_freqs.weight, if the file has one. GGUF says by the presence
    of tensors whether a model has biases, q/k norms and a separate output head. Raises as `spec_from_hf`.
    """
    architecture = _architecture(metadata.get("general.architecture"), source, "general.architecture")
    read = _Reader(metadata, source, f"{architecture}.")
    if read.optional("expert_count"):
        raise CheckpointError(
            f"{source}: {architecture}.expert_count = {read.get('expert_count')}: "
            "mixture-of-experts models are not served"
        )
    if "token_embd.weight" not in shapes:
        kind = "a vocabulary without weights" if not shapes else "no language model"
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing: the file is {kind}")
    num_heads = read.count("attention.head_count", 1 << 14)
    hidden_size = read.count("embedding_length", 1 << 20)
    head_dim = read.count("attention.key_length", 1 << 12, hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.count(key, 1 << 12, head_dim) != head_dim:
            raise read.fail(key, f"the head dimension {head_dim}: unequal sizes and partial rotary are not served")
    max_position = read.count("context_length", 1 << 30)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=read.count("feed_forward_length", 1 << 22),
        num_layers=read.count("block_count", 1 << 12),
        num_heads=num_heads,
        num_kv_heads=read.count("attention.head_count_kv", 1 << 14, num_heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(read, max_position, freq_factors),
        max_position_embeddings=max_position,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
    )
    _refuse_window(
        read.optional("attention.sliding_window"),
        max_len or max_position,
        source,
        f"{architecture}.attention.sliding_window",
    )
    return _checked(spec, source)


def _architecture(name: object, source: str, key: str) -> str:
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    if isinstance(name, str) and ("moe" in name.lower() or name == "mixtral"):
        raise CheckpointError(f"{source}: {key} is {name!r}: mixture-of-experts models are not served")
    raise CheckpointError(f"{source}: {key} is {name!r}, which is not served; served are {', '.join(ARCHITECTURES)}")


def _checked(spec: ModelSpec, source: str) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{source}: {spec.num_heads} attention heads are no multiple of {spec.num_kv_heads} key-value heads"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{source}: the head dimension must be even, got {spec.head_dim}")
    if spec.rope.freq_factors and len(spec.rope.freq_factors) != spec.head_dim // 2:
        raise CheckpointError(
            f"{source}: rope_freqs.weight must have {spec.head_dim // 2} values, got {len(spec.rope.freq_factors)}"
        )
    return spec


def _hf_window(read: _Reader, architecture: str) -> int:
    """Sliding window in tokens, 0 when no layer uses one."""
    window = read.optional("sliding_window")
    layer_types = read.words("layer_types")
    if layer_types:
        return window if "sliding_attention" in layer_types else 0
    if architecture in ("qwen2", "qwen3"):
        layers_below = read.count("max_window_layers", 1 << 12, 28, 0)
        used = read.flag("use_sliding_window", False) and layers_below < read.count("num_hidden_layers", 1 << 12)
        return window if used else 0
    return window


def _refuse_window(window: int, context: int, source: str, key: str) -> None:
    if 0 < window < context:
        raise CheckpointError(
            f"{source}: {key} = {window} is below the context of {context} tokens, and sliding-window attention is "
            f"not served; limit the context to {window} tokens (--max-model-len {window})"
        )


def _hf_rope(config: _Reader, max_position: int) -> RopeSpec:
    """Rope from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    source = config.source
    parameters = config.mapping("rope_parameters") or config.mapping("rope_scaling")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(f"{source}: rope parameters that differ by layer type are not served")
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None:
            parameters[key] = config.get(key)
    read = _Reader(parameters, f"{source}: rope_parameters")
    if read.number("partial_rotary_factor", 1.0) != 1.0:
        raise read.fail("partial_rotary_factor", "1 (others are not served)")
    if parameters.get("mrope_section"):
        raise CheckpointError(f"{source}: rope with mrope_section (a vision model) is not served")
    kind = read.word("rope_type", read.word("type", "default"))
    kinds = ("default", "linear", "llama3", "yarn", "dynamic")
    if kind not in kinds:
        raise CheckpointError(f"{source}: rope_type {kind!r} is not served; served are {', '.join(kinds)}")
    original = read.count("original_max_position_embeddings", 1 << 30, max_position)
    original = config.count("original_max_position_embeddings", 1 << 30, original)
    factor = read.number("factor", max_position / original if kind == "yarn" else 1.0)
    return RopeSpec(
        theta=read.number("rope_theta", 10000.0),
        kind=cast(RopeKind, kind),
        factor=factor,
        original_max_position=original,
        low_freq_factor=read.number("low_freq_factor", 1.0),
        high_freq_factor=read.number("high_freq_factor", 4.0),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        attention_factor=_attention_factor(read, factor) if kind == "yarn" else 0.0,
        truncate=read.flag("truncate", True),
    )


def _attention_factor(read: _Reader, factor: float) -> float:
    """YaRN's factor where the config gives it, by itself or through mscale; 0 where it is to be derived."""
    if read.get("attention_factor") is not None:
        return read.number("attention_factor")
    if not (read.get("mscale") and read.get("mscale_all_dim")) or factor <= 1.0:
        return 0.0
    mscale, mscale_all = read.number("mscale"), read.number("mscale_all_dim")
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all * math.log(factor) + 1.0)


def _gguf_rope(read: _Reader, max_position: int, freq_factors: tuple[float, ...]) -> RopeSpec:
    kind = read.word("rope.scaling.type", "none")
    linear = read.number("rope.scale_linear", 1.0)  # files older than rope.scaling.*
    if kind == "none" and linear != 1.0:
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise read.fail("rope.scaling.type", "none, linear or yarn")
    factor = read.number("rope.scaling.factor", linear)
    attention = read.number("rope.scaling.attn_factor", 1.0)
    if attention != 1.0 and kind != "yarn":
        raise read.fail("rope.scaling.attn_factor", "1 without yarn")
    derived = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return RopeSpec(
        theta=read.number("rope.freq_base", 10000.0),
        kind="default" if kind == "none" else cast(RopeKind, kind),
        factor=1.0 if kind == "none" else factor,
        original_max_position=read.count("rope.scaling.original_context_length", 1 << 30, max_position),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * derived if attention != 1.0 else 0.0,
        freq_factors=freq_factors,
    )

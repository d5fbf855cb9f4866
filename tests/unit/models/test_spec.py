"""ModelSpec from config.json and from GGUF metadata: every architecture, every rope spelling, every refusal."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.errors import CheckpointError
from phloem.models.gguf_file import GgufFile
from phloem.models.spec import ModelSpec, RopeSpec, spec_from_gguf, spec_from_hf
from phloem.models.tokenizer import read_json
from phloem.models.weights_gguf import read_gguf_spec
from tests.helpers.models import hf_model, write_gguf

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def hf(**changes: Any) -> ModelSpec:
    return spec_from_hf({key: value for key, value in (CONFIG | changes).items() if value is not ...})


def gguf(shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> ModelSpec:
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    return spec_from_gguf(metadata, SHAPES | (shapes or {}))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_containers_give_one_spec(architecture: str, tmp_path: Path) -> None:
    model = hf_model(architecture)
    model.save_pretrained(tmp_path)
    ours = spec_from_hf(read_json(tmp_path / "config.json"))
    assert (ours.architecture, ours.num_layers, ours.vocab_size) == (architecture, 2, 320)
    assert ours.head_dim == (32 if architecture in ("mistral", "qwen3") else 16)
    assert (ours.qkv_bias, ours.out_bias) == (architecture == "qwen2", False)
    assert ours.qk_norm == (architecture == "qwen3")
    theirs = read_gguf_spec(GgufFile(write_gguf(model, tmp_path / "m.gguf")))
    assert theirs.rms_norm_eps == pytest.approx(ours.rms_norm_eps)
    same = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "qkv_bias", "out_bias", "qk_norm", "vocab_size")
    assert all(getattr(theirs, name) == getattr(ours, name) for name in (*same, "tie_word_embeddings", "mlp_bias"))
    assert theirs.rope.theta == ours.rope.theta


def test_sizes_and_switches_of_config_json() -> None:
    spec = hf()
    assert spec.head_dim == 16
    assert not spec.tie_word_embeddings
    assert hf(head_dim=24).head_dim == 24
    assert hf(head_dim=None).head_dim == 16
    assert hf(num_key_value_heads=...).num_kv_heads == 4
    assert hf(model_type="qwen3").head_dim == 128
    biased = hf(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
    assert biased.qkv_bias
    assert biased.out_bias
    assert biased.mlp_bias
    assert biased.tie_word_embeddings
    assert biased.activation == "gelu_tanh"
    assert hf().num_parameters == 2 * (64 * 16 * 2 * 6 + 3 * 64 * 96) + 2 * 320 * 64


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeSpec(theta=10000.0, original_max_position=256)),
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5, original_max_position=256)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(theta=5e5, original_max_position=256)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeSpec(7.0, original_max_position=256)),
        (
            {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(9.0, "linear", 2.0, original_max_position=256),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.5,
                    "high_freq_factor": 5.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeSpec(5e5, "llama3", 8.0, 64, 1.5, 5.0),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0, "original_max_position_embeddings": 64}},
            RopeSpec(9.0, "yarn", 4.0, 64),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "attention_factor": 0.5,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "truncate": False,
                }
            },
            RopeSpec(1e4, "yarn", 4.0, 256, beta_fast=16, beta_slow=2, attention_factor=0.5, truncate=False),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeSpec(1e4, "dynamic", 2.0, 256)),
    ],
)
def test_rope_of_config_json_in_old_and_new_spelling(changes: dict[str, Any], expected: RopeSpec) -> None:
    assert hf(**changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox', which is not served; served are llama, mistral, qwen2, qwen3"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": "mixtral"}, "mixture-of-experts"),
        ({"model_type": "qwen3_moe"}, "mixture-of-experts"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is no language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"hidden_act": "relu2"}, "hidden_act must be one of"),
        ({"vocab_size": ...}, "vocab_size must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"hidden_size": 1 << 40}, "hidden_size must be"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"head_dim": 15}, "must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not served"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor must be a positive number"),
    ],
)
def test_what_is_not_served_in_config_json_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        hf(**changes)
    assert message in str(error.value)
    assert str(error.value).startswith("config.json")


@pytest.mark.parametrize(
    ("changes", "max_len", "refused"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 0, True),
        ({"model_type": "mistral", "sliding_window": 128}, 128, False),
        ({"model_type": "mistral", "sliding_window": 128}, 129, True),
        ({"model_type": "mistral", "sliding_window": 256}, 0, False),
        ({"model_type": "mistral", "sliding_window": None}, 0, False),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, 0, False),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 0, True),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 0, False),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"]},
            0,
            False,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            0,
            True,
        ),
    ],
)
def test_a_sliding_window_is_refused_where_it_would_take_effect(
    changes: dict[str, Any], max_len: int, refused: bool
) -> None:
    if not refused:
        spec_from_hf(CONFIG | changes, max_len=max_len)
        return
    with pytest.raises(CheckpointError, match=r"sliding_window = \d+ is below the context .*--max-model-len"):
        spec_from_hf(CONFIG | changes, max_len=max_len)


def test_gguf_switches_follow_the_tensors() -> None:
    assert not gguf().tie_word_embeddings
    metadata_only_embed = spec_from_gguf(METADATA, {"token_embd.weight": (320, 64)})
    assert metadata_only_embed.tie_word_embeddings
    full = gguf(
        {
            "blk.0.attn_q.bias": (64,),
            "blk.0.attn_output.bias": (64,),
            "blk.0.ffn_gate.bias": (96,),
            "blk.0.attn_q_norm.weight": (16,),
        }
    )
    assert full.qkv_bias
    assert full.out_bias
    assert full.mlp_bias
    assert full.qk_norm
    assert gguf(llama__attention__key_length=32, llama__attention__value_length=32).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama__rope__freq_base": 5e5}, RopeSpec(5e5, original_max_position=256)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 3.0}, RopeSpec(1e4, factor=1.0)),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 3.0}, RopeSpec(1e4, "linear", 3.0)),
        ({"llama__rope__scale_linear": 4.0}, RopeSpec(1e4, "linear", 4.0)),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 64,
            },
            RopeSpec(1e4, "yarn", 4.0, 64),
        ),
    ],
)
def test_rope_of_gguf(changes: dict[str, Any], expected: RopeSpec) -> None:
    rope = gguf(**changes).rope
    assert (rope.theta, rope.kind, rope.factor) == (expected.theta, expected.kind, expected.factor)
    assert rope.original_max_position == (expected.original_max_position or 256)


def test_rope_freqs_tensor_is_taken_and_measured() -> None:
    factors = tuple(1.0 + i for i in range(8))
    assert spec_from_gguf(METADATA, SHAPES, factors).rope.freq_factors == factors
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must have 8 values, got 3"):
        spec_from_gguf(METADATA, SHAPES, factors[:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "falcon"}, "'falcon', which is not served; served are llama"),
        ({"general__architecture": "qwen3moe"}, "mixture-of-experts"),
        ({"general__architecture": None}, "general.architecture is None"),
        ({"llama__expert_count": 8}, "llama.expert_count = 8: mixture-of-experts"),
        ({"llama__block_count": 0}, "llama.block_count must be"),
        ({"llama__block_count": 100000}, "llama.block_count must be"),
        ({"llama__attention__head_count": [4, 4]}, "llama.attention.head_count must be"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length must be the head dimension 16"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count must be the head dimension 16"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type must be none, linear or yarn"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be a positive number"),
        ({"llama__attention__sliding_window": 16}, "llama.attention.sliding_window = 16 is below"),
        ({"llama__context_length": None}, "llama.context_length must be"),
    ],
)
def test_what_is_not_served_in_gguf_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        gguf(**changes)
    assert message in str(error.value)


def test_a_vocabulary_without_weights_is_no_model() -> None:
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing: the file is a vocabulary"):
        spec_from_gguf(METADATA, {})


ROPE_KEYS = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "mscale")
HF_KEYS = (
    *CONFIG,
    *("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config"),
    *("num_experts", "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "layer_types", "original_max_position_embeddings"),
)
GGUF_KEYS = (
    *METADATA,
    *("llama.expert_count", "llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base"),
    *("llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear"),
    *("llama.rope.scaling.attn_factor", "llama.attention.sliding_window"),
    "llama.rope.scaling.original_context_length",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 1 << 70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(["yarn", "linear", "llama3", "qwen2", "mistral", "sliding_attention"])
ARRAYS = st.sampled_from([np.array([1, 2]), np.array([0.5]), np.zeros(0), ["a", "b"]])


@given(changes=st.dictionaries(st.sampled_from(HF_KEYS), JSON | WORDS, min_size=1, max_size=3))
def test_any_config_json_gives_a_spec_or_a_checkpoint_error(changes: dict[str, Any]) -> None:
    with contextlib.suppress(CheckpointError):
        hf(**changes)


@given(changes=st.dictionaries(st.sampled_from(GGUF_KEYS), JSON | WORDS | ARRAYS, min_size=1, max_size=3))
def test_any_gguf_metadata_give_a_spec_or_a_checkpoint_error(changes: dict[str, Any]) -> None:
    with contextlib.suppress(CheckpointError):
        spec_from_gguf(METADATA | changes, SHAPES)

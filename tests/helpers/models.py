"""Small random checkpoints of every architecture, in both containers, and plans to drive a runner with.

transformers makes the safetensors folders and is the oracle; GGUF files are written with the gguf package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from phloem.types import LogitRow, SamplingParams, StepPlan

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. I'm sure they're here; WE'LL see: don't, can't.",
    "In 2024, 1234567 people paid $19.99 each, and 1st, 2nd, 33rd came at 10:30.",
    "def square(value):\n    return value ** 2\n\n\nclass Tree:\n\tpass\n",
    "Élan café naïve ÜBER straße Привет мир 你好世界 こんにちは",
    "camelCase PascalCase snake_case HTTPServer parseJSON",
)


def hf_model(architecture: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A random model in float32, biases and norms included: as made they would be 0 and 1 and hide mistakes."""
    sizes = SIZES | ({"head_dim": 32} if architecture in ("mistral", "qwen3") else {})
    if architecture == "mistral":
        sizes["sliding_window"] = None
    config = CONFIGS[architecture](**(sizes | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def byte_level_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A small byte-level BPE with ChatML tokens, trained on CORPUS; the same on every call."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def save_folder(model: transformers.PreTrainedModel, folder: Path, **kwargs: Any) -> Path:
    """Write a Hugging Face-format folder with tokenizer and template; `kwargs` go to save_pretrained."""
    model.save_pretrained(folder, **kwargs)
    backend = byte_level_tokenizer(min(model.config.vocab_size, 320))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    form: str = "F32",
    metadata: dict[str, Any] | None = None,
    skip: Sequence[str] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write `model` as GGUF with matrices in `form`; `metadata` adds or (None) drops keys, `skip` drops tensors and
    `extra` adds some."""
    config = model.config
    name = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.rope.dimension_count": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    values |= gguf_vocabulary(byte_level_tokenizer(min(config.vocab_size, 320)), "gpt-2")
    values["tokenizer.chat_template"] = CHAT_TEMPLATE
    writer = gguf.GGUFWriter(path, name)
    for key, value in (values | (metadata or {})).items():
        add_value(writer, key, value)
    for theirs, tensor in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = gguf_name(theirs)
        if ours in skip:
            continue
        data = tensor.numpy()
        if name == "llama" and (".q_proj." in theirs or ".k_proj." in theirs):
            data = interleave(data, head_dim)
        kind = gguf.GGMLQuantizationType[form if data.ndim == 2 else "F32"]
        writer.add_tensor(ours, gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    for ours, data in (extra or {}).items():
        writer.add_tensor(ours, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_vocabulary(backend: Tokenizer, pre: str) -> dict[str, Any]:
    """tokenizer.ggml.* metadata of a byte-level backend whose first three tokens are special."""
    described = json.loads(backend.model.__getstate__())
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write one metadata value by its Python type; None writes nothing."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def gguf_name(name: str) -> str:
    """Hugging Face's tensor name to GGUF's, by plain replacement."""
    pairs = (
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    )
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def interleave(data: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of llama's q or k from half-split to GGUF's pairs, one row at a time."""
    out = np.empty_like(data)
    half = head_dim // 2
    for row in range(len(data)):
        head, inside = divmod(row, head_dim)
        out[head * head_dim + 2 * (inside % half) + inside // half] = data[row]
    return out


def greedy_plan(
    step_id: int, sequences: Sequence[Sequence[int]], computed: Sequence[int], stride: int, every_row: bool = False
) -> StepPlan:
    """All tokens from `computed[s]` on of each sequence; slot s * stride + position. Draws after the last row, or
    (`every_row`) asks for the logits of each."""
    rows = [(s, p) for s, tokens in enumerate(sequences) for p in range(computed[s], len(tokens))]
    starts = np.cumsum([0] + [len(tokens) - n for tokens, n in zip(sequences, computed, strict=True)])
    table = np.arange(len(sequences) * stride, dtype=np.int32).reshape(len(sequences), stride)
    wanted = range(len(rows)) if every_row else [int(end) - 1 for end in starts[1:]]
    params = SamplingParams(temperature=0.0)
    logit_rows = []
    for row in wanted:
        s, p = rows[row]
        history = np.asarray(sequences[s][: p + 1], np.int32)
        logit_rows.append(LogitRow(row, p + 1, 0, params, history, len(history)))
    return StepPlan(
        step_id,
        np.array([sequences[s][p] for s, p in rows], np.int32),
        np.array([p for _, p in rows], np.int32),
        np.array([table[s, p] for s, p in rows], np.int32),
        starts.astype(np.int32),
        np.arange(len(sequences), dtype=np.int32),
        table,
        logit_rows,
    )

"""Writes a GGUF model as a Hugging Face-format folder, dequantised, for servers that read nothing else.

Owns the conversion. Must not know servers. Values are those of the GGUF file, so that engines are compared on the same
weights; only their arithmetic differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from phloem.errors import UsageError
from phloem.models.gguf_file import GgufFile
from phloem.models.load import LoadedModel, load_model
from phloem.models.spec import ModelSpec
from phloem.models.tokenizer_gguf import build_vocabulary
from phloem.models.weights import dequantize
from phloem.models.weights_safetensors import HF_NAMES

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_hf_folder(gguf: Path, folder: Path) -> Path:
    """Write config, weights in float32, tokeniser and chat template; a folder that is complete is left as it is.

    Raises UsageError for models with a scaled rope or an architecture that the folder form is not written for.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    model = load_model(gguf)
    if model.spec.rope.kind != "default" or model.spec.rope.freq_factors:
        raise UsageError(f"{gguf.name} scales its rope ({model.spec.rope.kind}); only plain rope is converted")
    folder.mkdir(parents=True, exist_ok=True)
    metadata = GgufFile(gguf).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    _write_json(folder / "config.json", _config(model, metadata))
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(model.tokenizer.eos_ids)})
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    template = metadata.get("tokenizer.chat_template")
    _write_json(folder / "tokenizer_config.json", tokenizer | ({"chat_template": template} if template else {}))
    build_vocabulary(metadata, gguf.name).backend.save(str(folder / "tokenizer.json"))
    weights = {HF_NAMES.in_file(name): np.array(dequantize(tensor)) for name, tensor in model.weights.items()}
    unfinished = folder / "model.safetensors.part"
    save_file(weights, str(unfinished), metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    return folder


def _config(model: LoadedModel, metadata: dict[str, Any]) -> dict[str, Any]:
    spec: ModelSpec = model.spec
    if spec.architecture not in ARCHITECTURES:
        raise UsageError(f"the architecture {spec.architecture} is not converted; known: {', '.join(ARCHITECTURES)}")
    return {
        "architectures": [ARCHITECTURES[spec.architecture]],
        "model_type": spec.architecture,
        "torch_dtype": "float32",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.activation,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

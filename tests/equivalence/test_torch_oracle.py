"""The torch decoder against transformers, in float32: logits of every architecture, greedy text of the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from phloem.models.gguf_file import GgufFile
from phloem.models.load import LoadedModel, load_model
from phloem.runner.torch_runner import TorchRunner
from tests.helpers.models import greedy_plan, hf_model, save_folder, write_gguf

LENGTHS = (37, 5, 61, 1)
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": ROPES["yarn"]}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other by spinning, which on a busy machine costs more than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference_logits(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts]).numpy()


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def our_logits(model: LoadedModel, prompts: list[list[int]]) -> np.ndarray:
    stride = max(map(len, prompts))
    runner = TorchRunner(model.spec, model.weights, len(prompts) * stride, max_len=stride)
    return runner.logits(greedy_plan(0, prompts, [0] * len(prompts), stride, every_row=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_folder_equal_transformers(variant: str, tmp_path: Path, rng: np.random.Generator) -> None:
    architecture, overrides = VARIANTS[variant]
    model = hf_model(architecture, **overrides)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    loaded = load_model(save_folder(model, tmp_path))
    assert relative_error(our_logits(loaded, prompts), reference_logits(model, prompts)) < 1e-4


@pytest.mark.parametrize(
    "variant", ["llama", "llama-tied", "llama-biases", "llama-head-dim", "mistral", "qwen2", "qwen3"]
)
def test_logits_of_a_gguf_equal_transformers(variant: str, tmp_path: Path, rng: np.random.Generator) -> None:
    architecture, overrides = VARIANTS[variant]
    model = hf_model(architecture, **overrides)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    loaded = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert relative_error(our_logits(loaded, prompts), reference_logits(model, prompts)) < 1e-4


@pytest.mark.parametrize("form", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_logits_of_quantised_weights_equal_those_of_their_values(
    form: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """transformers gets the weights as they are after quantisation, so only our reading of the blocks is tested."""
    model = hf_model("llama")
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    loaded = load_model(write_gguf(model, tmp_path / "model.gguf", form))
    kind = gguf.GGMLQuantizationType[form]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.tensor(gguf.quants.dequantize(blocks, kind)))
    assert relative_error(our_logits(loaded, prompts), reference_logits(model, prompts)) < 1e-4


def test_chunks_and_decode_steps_equal_one_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    loaded = load_model(save_folder(hf_model("qwen3"), tmp_path))
    prompts = [rng.integers(0, 320, length).tolist() for length in (40, 23)]
    whole = our_logits(loaded, prompts)
    runner = TorchRunner(loaded.spec, loaded.weights, 80, max_len=40)
    parts: list[list[np.ndarray]] = [[], []]
    computed = [0, 0]
    for step in range(6):
        ends = [min(len(prompt), 7 * (step + 1) + s) for s, prompt in enumerate(prompts)]
        live = [s for s in range(2) if ends[s] > computed[s]]
        plan = greedy_plan(step, [prompts[s][: ends[s]] for s in live], [computed[s] for s in live], 40, True)
        plan.seq_table_row[:] = live
        plan.slot_table = np.arange(80, dtype=np.int32).reshape(2, 40)
        owner = np.repeat(live, np.diff(plan.seq_row_start))
        plan.write_slots[:] = owner * 40 + plan.positions
        logits = runner.logits(plan)
        for s in live:
            parts[s].append(logits[owner == s])
        computed = ends
    assert relative_error(np.concatenate(parts[0] + parts[1]), whole) < 1e-5


def test_a_row_without_write_slot_reads_what_another_sequence_writes(tmp_path: Path, rng: np.random.Generator) -> None:
    """Two identical prompts in one step: the second shares the first one's slots and writes nothing."""
    loaded = load_model(save_folder(hf_model("llama"), tmp_path))
    prompt = rng.integers(0, 320, 30).tolist()
    whole = our_logits(loaded, [prompt, prompt])
    runner = TorchRunner(loaded.spec, loaded.weights, 30, max_len=30)
    plan = greedy_plan(0, [prompt, prompt], [0, 0], 30, every_row=True)
    plan.slot_table = np.stack([np.arange(30, dtype=np.int32)] * 2)
    plan.write_slots[30:] = -1
    assert relative_error(runner.logits(plan), whole) < 1e-6


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> tuple[LoadedModel, transformers.PreTrainedModel]:
    """The demo model, loaded by us and dequantised into transformers by other means."""
    loaded = load_model(demo_model)
    spec = loaded.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    file = GgufFile(demo_model)
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state: dict[str, torch.Tensor] = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.format.upper()]
        values = gguf.quants.dequantize(np.asarray(file.data(tensor)), kind).reshape(tensor.shape)
        if "attn_q" in name or "attn_k" in name:
            heads = values.reshape(-1, spec.head_dim // 2, 2, spec.hidden_size)
            values = np.concatenate((heads[:, :, 0], heads[:, :, 1]), axis=1).reshape(tensor.shape)
        theirs = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}.get(name)
        if theirs is None:
            _, layer, part, _ = name.split(".")
            theirs = f"model.layers.{layer}.{names[part]}.weight"
        state[theirs] = torch.tensor(values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    fresh = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    model.model.rotary_emb = fresh
    return loaded, model.eval()


QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Explain photosynthesis to a child.",
    "def fibonacci(n):",
    "Name three primary colours.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "What is 17 + 25?",
    "List the planets of the solar system.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "How do I boil an egg?",
    "Tell me a joke about computers.",
    "What does HTTP stand for?",
    "Describe a sunset over the sea.",
    "Is water wet?",
    "Compare cats and dogs as pets.",
    "Complete: Once upon a time, in a small village,",
)


@pytest.mark.timeout(900)
def test_demo_logits_equal_transformers(demo: tuple[LoadedModel, transformers.PreTrainedModel]) -> None:
    loaded, model = demo
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:4]]
    prompts = [loaded.tokenizer.apply_chat_template(chat).tolist() for chat in chats]
    assert relative_error(our_logits(loaded, prompts), reference_logits(model, prompts)) < 1e-4


@pytest.mark.timeout(900)
def test_demo_greedy_tokens_equal_transformers(demo: tuple[LoadedModel, transformers.PreTrainedModel]) -> None:
    """transformers is shown our 64 tokens: where each is its own first choice after those before it, its greedy
    text is ours."""
    loaded, model = demo
    prompts = [
        loaded.tokenizer.apply_chat_template([{"role": "user", "content": question}]).tolist() for question in QUESTIONS
    ]
    stride = max(map(len, prompts)) + 64
    runner = TorchRunner(loaded.spec, loaded.weights, len(prompts) * stride, max_len=stride)
    sequences = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    for step in range(64):
        result = runner.step(greedy_plan(step, sequences, computed, stride))
        computed = [len(sequence) for sequence in sequences]
        for sequence, token in zip(sequences, result.token_ids.tolist(), strict=True):
            sequence.append(token)
    with torch.no_grad():
        for prompt, sequence in zip(prompts, sequences, strict=True):
            logits = model(torch.tensor([sequence[:-1]]), logits_to_keep=64).logits[0]
            assert logits.argmax(dim=-1).tolist() == sequence[len(prompt) :]
    assert "Paris" in loaded.tokenizer.decode(sequences[0][len(prompts[0]) :])

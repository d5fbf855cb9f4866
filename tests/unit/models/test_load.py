"""load_model: which path is what, what must agree, and what it reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from phloem.errors import CheckpointError, UsageError
from phloem.models.load import LoadProgress, load_model, random_weights
from phloem.models.weights import check_weights, dequantize
from tests.helpers.models import byte_level_tokenizer, hf_model, save_folder, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(hf_model("llama"), tmp_path / "tiny-llama")


def test_a_folder_and_a_gguf_file_of_one_model_agree(folder: Path) -> None:
    stages: list[LoadProgress] = []
    one = load_model(folder, progress=stages.append)
    other = load_model(str(write_gguf(hf_model("llama"), folder / "packed.gguf")))
    assert (one.name, other.name) == ("tiny-llama", "packed")
    assert one.weights.keys() == other.weights.keys()
    chat = [{"role": "user", "content": "hello"}]
    assert one.tokenizer.apply_chat_template(chat).tolist() == other.tokenizer.apply_chat_template(chat).tolist()
    assert one.tokenizer.apply_chat_template(chat).dtype == np.int32
    assert one.weight_bytes == other.weight_bytes == sum(4 * int(np.prod(t.shape)) for t in one.weights.values())
    assert [stage.share for stage in stages] == sorted(stage.share for stage in stages)
    assert stages[0].share == 0.0
    assert stages[-1] == ("done", 1.0)


def test_the_demo_model_opens(demo_model: Path) -> None:
    model = load_model(demo_model)
    assert model.spec.num_layers == 30
    assert 80e6 < model.weight_bytes < 100e6
    assert 130e6 < model.spec.num_parameters < 136e6


def test_paths_that_are_no_model(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no model at .*nowhere"):
        load_model(folder / "nowhere")
    (folder / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"a\.txt is no model"):
        load_model(folder / "a.txt")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(folder)
    (folder / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"it holds m\.gguf: give the path of that file"):
        load_model(folder)


def test_a_tokenizer_that_outgrows_the_embedding_is_refused(folder: Path) -> None:
    byte_level_tokenizer(330).save(str(folder / "tokenizer.json"))
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["added_tokens"].append(dict(backend["added_tokens"][0], id=320, content="<|more|>"))
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(CheckpointError, match="but the weights only 320"):
        load_model(folder)


def test_custom_code_in_a_config_is_not_run(folder: Path) -> None:
    marker = folder / "pwned"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": ["modeling_evil.Evil", None]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    load_model(folder)
    assert not marker.exists()


def test_dummy_weights_need_no_weight_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_model(folder)
    model = load_model(folder, dummy=True)
    check_weights(model.spec, {name: tensor.shape for name, tensor in model.weights.items()}, str, "dummy")
    assert np.isfinite(dequantize(model.weights["layers.1.down"])).all()
    again = random_weights(model.spec)
    assert all(np.array_equal(again[name].data, tensor.data) for name, tensor in model.weights.items())


def test_a_copied_model_needs_nothing_but_its_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    assert load_model(tmp_path / "copy").name == "copy"


def test_a_given_template_replaces_the_models(folder: Path) -> None:
    assert load_model(folder, chat_template="T").tokenizer.render_chat([{"role": "user", "content": "x"}]) == "T"


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    load_model(folder, max_len=256)
    with pytest.raises(UsageError, match=r"made for 256 tokens, --max-model-len 257 is more"):
        load_model(folder, max_len=257)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder, max_len=1024)
    with pytest.raises(UsageError, match="made for 1024 tokens"):
        load_model(folder, max_len=1025)

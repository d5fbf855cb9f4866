"""`phloem doctor`: facts of the machine, and ceilings that follow from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phloem.cli import doctor as module
from phloem.cli.doctor import describe, doctor, machine_lines, model_lines
from phloem.cli.main import main
from phloem.config import EngineConfig
from phloem.engine.loading import load_parts
from phloem.engine.outlook import Outlook, look
from phloem.errors import CheckpointError, UsageError
from phloem.kernels import native
from phloem.models import find_model
from phloem.models.load import load_model
from phloem.runner.footprint import Footprint, footprint
from tests.helpers.models import hf_model, save_folder

COST = Footprint(
    weight_bytes=3_000_000,
    read_bytes=2_000_000,
    kv_bytes_per_token=1000,
    prefill_ops=4_000_000,
    decode_ops=5_000_000,
    attention_ops=100,
    formats=("q8",),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement, no second interpreter."""
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 10e9)
    monkeypatch.setattr(native, "measure_peak", lambda isa, threads: 200e9)
    monkeypatch.setattr(module, "_gpu", lambda: "")


def test_the_slower_of_memory_and_arithmetic_is_the_ceiling() -> None:
    outlook = Outlook("m", "llama", 1000, 100, 5000, COST)
    facts = describe(outlook, {"bandwidth": 1e9, "peak": 1e12})
    assert facts["decode_ceiling"]["0"] == pytest.approx(1e9 / 2_000_000)
    assert facts["decode_ceiling"]["2048"] == pytest.approx(1e9 / (2_000_000 + 2048 * 1000))
    assert facts["prefill_ceiling"] == pytest.approx(1e12 / 4_000_000)
    facts = describe(outlook, {"bandwidth": 1e12, "peak": 1e9})
    assert facts["decode_ceiling"]["2048"] == pytest.approx(1e9 / (5_000_000 + 2048 * 100))


def test_the_footprint_is_what_the_engine_then_has(tmp_path: Path) -> None:
    source = save_folder(hf_model("llama"), tmp_path / "model")
    config = EngineConfig(str(source), max_total_tokens=640, page_size=4, kv_cache_dtype="int8", quantization="q4")
    outlook = look(config)
    parts = load_parts(config)
    try:
        assert outlook.cost.weight_bytes == parts.description["weight_bytes"]
        assert list(outlook.cost.formats) == parts.description["weight_formats"]
        assert outlook.cost.kv_bytes_per_token == parts.description["kv_bytes_per_token"]
        assert outlook.kv_tokens == parts.description["kv_tokens"] == 640
        assert outlook.max_model_len == parts.description["max_model_len"]
    finally:
        parts.runner.close()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_read_whole_only_where_it_is_the_head(tmp_path: Path, tied: bool) -> None:
    source = save_folder(hf_model("llama", tie_word_embeddings=tied), tmp_path / "model")
    model = load_model(source)
    cost = footprint(model.spec, model.weights, "none", "f32")
    embed = model.weights["embed"].data.nbytes
    assert cost.weight_bytes - cost.read_bytes == (0 if tied else embed)
    assert cost.decode_ops - cost.prefill_ops == 2 * model.spec.vocab_size * model.spec.hidden_size
    num_layer_weights = model.spec.num_parameters - (1 if tied else 2) * model.spec.vocab_size * model.spec.hidden_size
    assert cost.prefill_ops == 2 * num_layer_weights


def test_json_and_lines_hold_the_same_facts(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(demo_model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["isa"] in native.supported_isas()
    assert facts["model"]["cost"]["formats"] == ["q4m", "q8"]
    assert doctor([str(demo_model)]) == 0
    shown = capsys.readouterr().err
    for line in machine_lines(facts["machine"])[:3]:
        assert f"phloem: {line}\n" in shown
    assert "22.5 KiB a token" in shown
    assert model_lines(facts["model"])[2] in shown


def test_without_the_demo_model_the_machine_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(find_model, "DEMO_PACKAGE", "no-such-package")
    assert doctor([]) == 0
    shown = capsys.readouterr().err
    assert "10.0 GB/s from memory, 200 GOP/s of integers" in shown
    assert "no model: name one" in shown


def test_a_model_that_cannot_be_served_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(CheckpointError, match="mixtral"):
        doctor([str(folder)])
    with pytest.raises(UsageError, match="no model at"):
        doctor([str(tmp_path / "absent.gguf")])


def test_an_isa_that_is_missing(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "supported_isas", lambda: ["portable"])
    with pytest.raises(UsageError, match=r"isa avx2 is not available: this CPU runs portable"):
        doctor([str(demo_model), "--isa", "avx2"])

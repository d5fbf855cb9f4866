"""The command line: spellings, wrong flags, what each flag becomes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phloem import bench
from phloem.cli.flags import ALIASES, FLASHINFER_WARNING, LRU_WARNING, dashed, field_docs, modernise
from phloem.cli.main import BENCHMARKS, main
from phloem.cli.serve_args import CHAT_TEMPERATURE, parse_run, parse_serve
from phloem.config import EngineConfig, ServerConfig
from phloem.errors import UsageError
from phloem.types import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_the_command_that_users_of_other_servers_type(model: str) -> None:
    words = f"--model-path {model} --port 30001 --host 127.0.0.1 --mem-fraction-static 0.85"
    words += " --chunked-prefill-size 2048 --schedule-policy lpm"
    args = parse_serve(words.split())
    assert args.engine == EngineConfig(
        model=model, mem_fraction_static=0.85, chunked_prefill_size=2048, schedule_policy="lpm"
    )
    assert args.server == ServerConfig(port=30001)
    assert args.warnings == []


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--max-model-len 99", "max_model_len", 99),
        ("--context-length=99", "max_model_len", 99),
        ("--context_length 99", "max_model_len", 99),
        ("--gpu_memory_utilization 0.5", "mem_fraction_static", 0.5),
        ("--gpu-memory-utilization=0.5", "mem_fraction_static", 0.5),
        ("--max-num-seqs 3", "max_running_requests", 3),
        ("--max-running-requests 3", "max_running_requests", 3),
        ("--max-num-batched-tokens 64", "chunked_prefill_size", 64),
        ("--page-size 16", "page_size", 16),
        ("--max-total-tokens 1000", "max_total_tokens", 1000),
        ("--radix-eviction-policy lfu", "eviction_policy", "lfu"),
        ("--quantization q8", "quantization", "q8"),
        ("--share-cache-across-keys", "share_cache_across_keys", True),
        ("--no-group-shared-prefixes", "group_shared_prefixes", False),
    ],
)
def test_engine_flags_in_every_spelling(model: str, words: str, field: str, value: object) -> None:
    assert getattr(parse_serve([model, *words.split()]).engine, field) == value
    assert getattr(parse_run([model, *words.split()]).engine, field) == value


def test_server_flags(model: str) -> None:
    words = "--served-model-name a_b --api-key x_1 --api_key y --chat-template t.jinja --tool-call-parser hermes"
    args = parse_serve([model, *words.split()])
    server = args.server
    assert server.served_model_name == "a_b"
    assert server.api_keys == ("x_1", "y")
    assert (args.engine.chat_template, server.tool_call_parser) == ("t.jinja", "hermes")


def test_a_value_keeps_its_underscores() -> None:
    assert dashed("--served_model_name=a_b") == "--served-model-name=a_b"
    assert dashed("my_model.gguf") == "my_model.gguf"


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_field_is_documented_and_has_a_flag(config: type, capsys: pytest.CaptureFixture[str]) -> None:
    docs = field_docs(config)
    assert docs.keys() == {field.name for field in dataclasses.fields(config)}
    with pytest.raises(SystemExit) as leaving:
        parse_serve(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in docs)


def test_aliases_name_fields_that_exist() -> None:
    fields = {f.name for config in (EngineConfig, ServerConfig) for f in dataclasses.fields(config)}
    assert ALIASES.keys() <= fields


@pytest.mark.parametrize("words", [["--schedule-policy", "lru"], ["--schedule_policy=lru"]])
def test_lru_as_schedule_policy_is_taken_as_eviction_policy(model: str, words: list[str]) -> None:
    args = parse_serve([model, *words])
    assert (args.engine.eviction_policy, args.engine.schedule_policy) == ("lru", EngineConfig().schedule_policy)
    assert args.warnings == [LRU_WARNING]


def test_enable_flashinfer_is_taken_with_a_warning(model: str) -> None:
    assert parse_serve(["--enable-flashinfer", model]).warnings == [FLASHINFER_WARNING]
    assert modernise(["--enable_flashinfer", "m"]) == (["m"], [FLASHINFER_WARNING])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-model 5", "--max-model-len"),
        ("--max_modellen 5", "--max-model-len"),
        ("--mem-fraction 0.5", "--mem-fraction-static"),
        ("--prot 80", "--port"),
        ("--schedule-polcy fcfs", "--schedule-policy"),
    ],
)
def test_unknown_or_abbreviated_flag_names_the_nearest(model: str, words: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"unknown flag {dashed(words.split()[0])}; did you mean {expected}") as raised:
        parse_serve([model, *words.split()])
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--zzzz"], r"unknown flag --zzzz \(see phloem serve --help\)"),
        (["--port", "http"], "--port: invalid int value: 'http'"),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--port"], "--port: expected one argument"),
        (["--schedule-policy", "best"], "invalid choice: 'best'"),
        (["--chunked-prefill-size", "-1"], "--chunked-prefill-size must be from 1 to 1048576, got -1"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static must be from 0.01 to 0.99, got 1.5"),
        (["extra"], "unexpected argument 'extra'"),
        (["--model", "other"], "two models given"),
    ],
)
def test_wrong_usage_is_one_clear_line(model: str, words: list[str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as raised:
        parse_serve([model, *words])
    assert "\n" not in raised.value.message


def test_open_host_without_key_is_warned_about(model: str) -> None:
    (warning,) = parse_serve([model, "--host", "0.0.0.0"]).warnings
    assert "--api-key" in warning
    assert parse_serve([model, "--host", "0.0.0.0", "--api-key", "k"]).warnings == []


def test_run_takes_sampling_flags(model: str) -> None:
    args = parse_run([model, "--temperature", "0", "--max-tokens", "7", "--seed", "3", "--system", "Be brief."])
    assert (args.params.temperature, args.params.max_tokens, args.params.seed) == (0.0, 7, 3)
    assert args.system == "Be brief."
    assert parse_run([model]).params == SamplingParams(temperature=CHAT_TEMPERATURE)


@pytest.mark.parametrize("words", [["--temperature", "-1"], ["--top-p", "0"]])
def test_run_refuses_sampling_out_of_range(model: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, *words]) == 2
    assert words[0].strip("-").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "stderr"),
    [
        ([], 2, "no command given"),
        (["sevre"], 2, "did you mean serve?"),
        (["serve", "--prot", "1"], 2, "did you mean --port"),
        (["serve", "/nowhere/x.gguf"], 2, "no model at /nowhere/x.gguf"),
        (["bench", "tre"], 2, "did you mean tree?"),
        (["version", "x"], 2, "takes no arguments"),
    ],
)
def test_exit_codes(words: list[str], code: int, stderr: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    shown = capsys.readouterr()
    assert stderr in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("words", [["--help"], ["help"], ["version"], ["--version"], ["bench", "--help"]])
def test_informing_commands_succeed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "phloem" in capsys.readouterr().out


def test_every_benchmark_has_a_command() -> None:
    folder = Path(bench.__file__).parent
    programs = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8")}
    assert programs == {name.replace("-", "_") for name in BENCHMARKS}

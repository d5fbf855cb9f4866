"""The chat in the terminal: history, figures, commands, Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phloem.cli.run import Chat, TurnStats, talk
from phloem.cli.serve_args import RunArgs
from phloem.config import EngineConfig
from phloem.errors import InvalidRequestError
from phloem.types import SamplingParams
from tests.unit.cli.fake_engine import FakeEngine, as_engine

ROOT = Path(__file__).resolve().parents[3]


def make_chat(engine: FakeEngine, system: str = "") -> Chat:
    chat = Chat(as_engine(engine), SamplingParams(), system)
    chat.reset()
    return chat


async def test_the_second_turn_extends_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    chat = make_chat(engine, "Be brief.")
    first, second = TurnStats(), TurnStats()
    await chat.answer("Capital?", first)
    await chat.answer("Sure?", second)
    assert engine.prompts[0] == "<system>Be brief.<user>Capital?<assistant>"
    assert engine.prompts[1] == engine.prompts[0] + "Paris is it.<user>Sure?<assistant>"
    assert capsys.readouterr().out == "Paris is it.Paris is it."
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (len(engine.prompts[0]), 0, 3)
    assert second.cached_tokens == len(engine.prompts[0])
    assert engine.aborted == []


async def test_a_refused_question_leaves_no_trace() -> None:
    engine = FakeEngine()
    chat = make_chat(engine)
    await chat.answer("hi", TurnStats())
    before = list(chat.messages)
    with pytest.raises(InvalidRequestError):
        await chat.answer("too long", TurnStats())
    assert chat.messages == before


def test_figures_read_well() -> None:
    stats = TurnStats(prompt_tokens=40, cached_tokens=30, output_tokens=11, ttft_s=0.5, decode_s=0.25, end="stopped")
    assert str(stats) == "[40 prompt tokens, 30 cached, first token 0.50 s, 11 tokens, 40.0 tok/s, stopped]"
    assert "tok/s" not in str(TurnStats(prompt_tokens=1, output_tokens=1))


def run_piped(engine: FakeEngine, lines: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return talk(as_engine(engine), RunArgs(EngineConfig(model="fake"), SamplingParams(), system="S"))


def test_commands_and_piped_questions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine("Yes.")
    lines = "one\n\n/reset\ntwo\n/system T\nthree\n/nonsense\n/help\n/exit\nnever asked\n"
    assert run_piped(engine, lines, monkeypatch) == 0
    assert engine.prompts == [
        "<system>S<user>one<assistant>",
        "<system>S<user>two<assistant>",
        "<system>T<user>three<assistant>",
    ]
    shown = capsys.readouterr()
    assert shown.out.startswith("Yes.\nYes.\nYes.\nunknown command /nonsense")
    assert shown.err.count("prompt tokens") == 3


def test_a_failed_piped_question_is_told_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine("Yes.")
    assert run_piped(engine, "too long\nfine\n", monkeypatch) == 1
    assert engine.prompts == ["<system>S<user>fine<assistant>"]
    assert "the prompt is too long; or start anew with /reset" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.cli.fake_engine"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.read(5) == "word0"
        process.send_signal(signal.SIGINT)
        figures = process.stderr.readline()
        assert figures.rstrip().endswith("stopped]"), figures
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0

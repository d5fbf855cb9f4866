"""Text, ideal and file workloads: what they promise about sharing and repeatability."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.bench.ideal import ModelEncoder, PrefixSet, fill_ideal
from phloem.bench.jobs import Exchange, Job, Message, Record
from phloem.bench.real_data import ReplayOptions, replay, task_agents
from phloem.bench.text import TextModel, json_tokens, plural
from phloem.bench.workloads import Sizes, make_workload
from phloem.errors import UsageError
from phloem.types import Int32Array


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12), st.lists(st.integers(0, 2)))
def test_prefix_set_agrees_with_brute_force(added: list[list[int]], query: list[int]) -> None:
    known = PrefixSet()
    for ids in added:
        known.add(np.array(ids, np.int32))
    prefixes = {tuple(ids[:n]) for ids in added for n in range(len(ids) + 1)}
    expected = max(n for n in range(len(query) + 1) if n == 0 or tuple(query[:n]) in prefixes)
    assert known.match(np.array(query, np.int32)) == expected


class Words:
    """One token per word."""

    def ids(self, text: str) -> Int32Array:
        return np.array([sum(map(ord, word)) for word in text.split()], np.int32)

    async def prompt_ids(self, job: Job) -> Int32Array:
        return self.ids(job.prompt)

    async def answer_ids(self, text: str) -> Int32Array:
        return self.ids(text)


async def test_ideal_counts_what_came_before_and_no_more() -> None:
    def exchange(prompt: str, sent_s: float, end_s: float, text: str, error: str = "") -> Exchange:
        return Exchange(Job(prompt=prompt), Record("p", 0, 0, sent_s, end_s, error=error), text)

    exchanges = [
        exchange("a b c", 0.0, 2.0, "d e"),
        exchange("a b x", 1.0, 3.0, "y"),  # shares with the first, which still runs
        exchange("a b c d e f", 1.5, 4.0, "g"),  # the answer to the first is not there yet
        exchange("a b c d e f", 5.0, 6.0, "g"),  # the same again: all but the last
        exchange("a b c d", 5.5, 7.0, "h", error="failed"),
        exchange("a b c d q", 8.0, 9.0, "h"),
    ]
    counted = await fill_ideal(exchanges, Words())
    assert [e.record.ideal_tokens for e in exchanges] == [0, 2, 3, 5, None, 4]
    assert counted == 3 + 3 + 6 + 6 + 5


async def test_the_last_token_of_an_answer_is_never_reused() -> None:
    first = Exchange(Job(prompt="a"), Record("p", 0, 0, 0.0, 1.0), "b c")
    second = Exchange(Job(prompt="a b c d"), Record("p", 1, 0, 2.0, 3.0), "e")
    await fill_ideal([first, second], Words())
    assert second.record.ideal_tokens == 2


async def test_ideal_of_agents_by_the_real_tokeniser(demo_model: Path) -> None:
    """All but a first prompt share the system prompt; a second turn reuses all but its answer's last token."""
    encoder = ModelEncoder.load(demo_model)
    messages: list[Message] = [
        {"role": "system", "content": TextModel(0).prose(200)},
        {"role": "user", "content": "Hi"},
    ]
    first = Exchange(Job(tuple(messages)), Record("p", 0, 0, 0.0, 1.0), "Hello there, friend")
    answer: Message = {"role": "assistant", "content": first.text}
    longer = (*messages, answer, {"role": "user", "content": "Go on"})
    second = Exchange(Job(longer), Record("p", 1, 0, 2.0, 3.0), "Well")
    await fill_ideal([first, second], encoder)
    asked = len(await encoder.prompt_ids(first.job))
    spoken = len(await encoder.answer_ids(first.text))
    assert second.record.ideal_tokens == asked + spoken - 1


@pytest.mark.parametrize("tokens", [20, 200, 2000])
async def test_prose_has_about_the_length_that_was_asked(tokens: int, demo_model: Path) -> None:
    counts = [len(await ModelEncoder.load(demo_model).answer_ids(TextModel(i).prose(tokens))) for i in range(5)]
    assert np.mean(counts) == pytest.approx(tokens, rel=0.2)


def test_text_repeats_by_seed_and_reads_well() -> None:
    assert TextModel("a", 1).prose(300) == TextModel("a", 1).prose(300)
    assert TextModel("a", 1).prose(300) != TextModel("a", 2).prose(300)
    assert TextModel(0).prose(0) == ""
    assert [plural(noun) for noun in ("battery", "delivery", "index", "key", "map")] == [
        "batteries", "deliveries", "indexes", "keys", "maps",
    ]  # fmt: skip


def test_tools_are_different_and_valid() -> None:
    tools = TextModel(3).tools(2000)
    names = [tool["function"]["name"] for tool in tools]  # type: ignore[index]
    assert len(set(names)) == len(names) >= 5
    assert sum(map(json_tokens, tools)) == pytest.approx(2000, rel=0.3)
    assert json.loads(TextModel(3).tool_result(100))["status"] == "ok"


def test_zipf_favours_the_first_groups() -> None:
    workload = make_workload("shared-prefix", Sizes(agents=300, groups=4, zipf=1.5, system_tokens=30), 0)
    prefixes = [next(program.start())[0].messages[0]["content"] for program in workload.programs]
    counts = sorted((prefixes.count(p) for p in set(prefixes)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 2 * counts[1] > counts[-1]


def test_independent_prompts_differ_from_the_first_words() -> None:
    workload = make_workload("independent", Sizes(agents=50, system_tokens=40), 0)
    openings = {str(next(p.start())[0].messages[0]["content"]).split(":")[0] for p in workload.programs}
    assert len(openings) == 50


def write_lines(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_replay_of_recorded_requests(tmp_path: Path) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "top_p": 0.5,
        "stream": True,
    }
    path = write_lines(tmp_path / "r.jsonl", {"timestamp": 1000, "body": body}, {"timestamp": 3000, "prompt": "abc"})
    workload = replay(path, ReplayOptions(speed=2.0))
    assert [program.at_s for program in workload.programs] == [0.5, 1.5]
    first, second = (next(program.start())[0] for program in workload.programs)
    assert (first.messages[0]["content"], first.max_tokens, dict(first.extra)) == ("hi", 9, {"top_p": 0.5})
    assert (second.prompt, second.messages) == ("abc", ())


def test_replay_of_a_mooncake_trace_shares_as_its_ids_do(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 10, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 3]},
        {"timestamp": 20, "input_length": 600, "output_length": 1, "hash_ids": [4, 1]},
    ]
    workload = replay(write_lines(tmp_path / "t.jsonl", *lines), ReplayOptions(scale=0.1, limit=3))
    jobs = [next(program.start())[0] for program in workload.programs]
    assert [job.max_tokens for job in jobs] == [2, 2, 1]
    first, second, third = (job.prompt.split("\n\n") for job in jobs)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert first[0] != third[0]


def test_replay_names_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a"}\n{broken\n')
    with pytest.raises(UsageError, match=r"r.jsonl:2: not JSON"):
        replay(path, ReplayOptions())
    with pytest.raises(UsageError, match=r"r.jsonl:1: a request needs"):
        replay(write_lines(path, {"timestamp": 0}), ReplayOptions())
    with pytest.raises(UsageError, match="holds no requests"):
        replay(write_lines(path), ReplayOptions())


def test_real_tasks_and_tools(tmp_path: Path) -> None:
    bfcl = tmp_path / "bfcl"
    tool = {
        "name": "cd",
        "description": "x" * 400,
        "parameters": {"type": "dict", "properties": {"n": {"type": "float"}}},
    }
    for name in ("gorilla_file_system", "math_api", "message_api", "ticket_api"):
        write_lines(bfcl / f"{name}.jsonl", tool)
    for name in ("trading_bot", "travel_booking", "posting_api", "vehicle_control"):
        write_lines(bfcl / f"{name}.jsonl", *[tool] * 20)
    turns = [[{"role": "user", "content": f"do {i}"}] for i in range(2)]
    tasks = [
        {"question": turns, "involved_classes": ["GorillaFileSystem"]},
        {"question": turns, "involved_classes": ["TravelAPI"]},
    ]
    write_lines(bfcl / "multi_turn_base.jsonl", *tasks)
    workload = task_agents(tmp_path, Sizes(agents=2, turns=5, system_tokens=700), 0)
    assert (workload.params["tools"], workload.params["tasks"]) == (4, 1)
    session = workload.programs[0].start()
    sent = [next(session)[0]] + [session.send(["ok"])[0] for _ in range(4)]
    assert len(sent) == 5
    assert '"type": "number"' in str(sent[0].messages[0]["content"])
    asked = [str(job.messages[-1]["content"]) for job in sent]
    assert asked[0] == "do 0"
    assert asked[1].startswith("Tool result: ")
    assert asked[2] == "do 1"

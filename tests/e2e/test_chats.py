"""The file of conversations: what it holds, and a part of it served eight at a time."""

from __future__ import annotations

from tests.e2e.chats import Ideal, Turn, read_chats, run
from tests.e2e.conftest import Server

SHORT = (
    "capital-of-france",
    "one-word",
    "emoji-only",
    "repeat-the-rule",
    "lentil-soup",
    "bread-with-allergens",
    "agent-refuses",
    "agent-meeting",
    "translate-arabic",
    "html-extraction",
)


def test_the_file_is_as_described() -> None:
    chats = read_chats()
    assert len(chats) == 30
    assert len({chat["id"] for chat in chats}) == 30
    assert all(2 <= len(chat["turns"]) <= 8 for chat in chats)
    systems = [chat["system"] for chat in chats if chat["system"]]
    assert len(set(systems)) < len(systems) - 5


async def test_nothing_is_lost_and_reuse_is_ideal(server: Server) -> None:
    chats = [chat for chat in read_chats() if chat["id"] in SHORT]
    report = await run(server.url, chats, at_once=8, max_tokens=16)
    assert len(report.turns) == sum(len(chat["turns"]) for chat in chats)
    assert report.faults() == []
    assert report.ideal.least == report.ideal.most == report.computed


def turn(chat: str, prompt: str, answer: str, at_s: float, cached: int = 0) -> Turn:
    ids = [ord(letter) for letter in prompt]
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": len(answer),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return Turn(chat, 1, ids, at_s, at_s + 1.0, at_s + 2.0, answer, [ord(letter) for letter in answer], ["stop"], usage)


def test_the_ideal_counts_each_token_once() -> None:
    cases = {
        "alone": ([turn("a", "abc", "xyz", 0.0)], 3),
        "trunk shared by two at once": ([turn("a", "abcd", "x", 0.0), turn("b", "abef", "x", 0.5)], 6),
        "same prompt, last row again": ([turn("a", "abc", "x", 0.0), turn("b", "abc", "x", 0.0)], 4),
        "next turn: all but the last sampled": ([turn("a", "abc", "xyz", 0.0), turn("a", "abcxyzq", "", 9.0)], 5),
        "inside what is there": ([turn("a", "abcdef", "x", 0.0), turn("b", "abc", "x", 9.0)], 7),
        "before what holds it": ([turn("b", "abc", "x", 0.0), turn("a", "abcdef", "x", 9.0)], 6),
        "ends inside an answer": ([turn("a", "abc", "defg", 0.0), turn("b", "abcde", "x", 9.0)], 4),
    }
    for name, (turns, expected) in cases.items():
        ideal = Ideal(turns)
        assert (ideal.least, ideal.most) == (expected, expected), name


def test_the_ideal_is_a_range_where_the_clock_cannot_tell() -> None:
    ideal = Ideal([turn("a", "abcdef", "x", 0.0), turn("b", "abc", "x", 0.5)])
    assert (ideal.least, ideal.most) == (6, 7)


def test_faults_are_named() -> None:
    bad = turn("a", "abc", "xyz", 0.0, cached=3)
    bad.finish_reasons.append("length")
    assert bad.faults() == ["2 finish reasons", "3 cached of 3"]

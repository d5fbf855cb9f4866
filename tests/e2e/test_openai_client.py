"""The official OpenAI client against a server process with the demo model: chat and completions, streamed and not."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.conftest import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def cached(usage: object) -> int:
    return usage.prompt_tokens_details.cached_tokens  # type: ignore[attr-defined]


def test_models_and_health(server: Server) -> None:
    (model,) = server.openai.models.list().data
    assert "SmolLM2" in model.id
    assert server.openai.models.retrieve(model.id).id == model.id
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json()["version"]


def test_streamed_chat_says_paris_and_second_turn_is_cached(server: Server) -> None:
    """Turn 2 reuses all of turn 1, prompt and answer, but the last sampled token."""
    stream = server.openai.chat.completions.create(
        model="",
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    ids = [i for c in chunks for choice in c.choices for i in getattr(choice, "token_ids", None) or []]
    first = chunks[-1].usage
    assert cached(first) == 0
    assert first.completion_tokens == len(ids) > 5

    messages = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
    # The text gives back the very ids, so nothing of the first turn is lost on the way.
    prompt = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    whole = server.http.post("/tokenize", json={"messages": QUESTION}).json()["tokens"] + ids
    assert prompt[: len(whole)] == whole
    second = server.openai.chat.completions.create(model="", messages=messages, temperature=0, max_tokens=16)
    assert second.usage.prompt_tokens == len(prompt)
    assert cached(second.usage) == first.prompt_tokens + first.completion_tokens - 1
    assert "Rome" in second.choices[0].message.content


def test_stream_and_whole_agree(server: Server) -> None:
    def ask(**fields: object) -> object:
        return server.openai.chat.completions.create(
            model="", messages=QUESTION, temperature=0.8, seed=5, max_tokens=24, **fields
        )

    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert cached(whole.usage) == 0
    assert cached(chunks[-1].usage) == whole.usage.prompt_tokens - 1


def test_n_and_seed(server: Server) -> None:
    def texts() -> list[str]:
        answer = server.openai.chat.completions.create(
            model="", messages=QUESTION, n=3, temperature=1.2, seed=11, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens <= 36
        return [choice.message.content for choice in answer.choices]

    before = server.stats()["num_prefill_rows"]
    first = texts()
    prompt = len(server.http.post("/tokenize", json={"messages": QUESTION}).json()["tokens"])
    assert server.stats()["num_prefill_rows"] - before <= prompt + 2
    assert len(set(first)) > 1
    assert texts() == first


def test_streamed_choices_are_told_apart(server: Server) -> None:
    texts = ["", ""]
    ends = []
    for chunk in server.openai.completions.create(
        model="", prompt="One, two,", n=2, temperature=1.0, seed=3, max_tokens=8, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1]
    whole = server.openai.completions.create(model="", prompt="One, two,", n=2, temperature=1.0, seed=3, max_tokens=8)
    assert [choice.text for choice in whole.choices] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(server: Server, stream: bool) -> None:
    fields = {"model": "", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 24}
    free = server.openai.completions.create(**fields).choices[0].text
    assert " 9," in free
    answer = server.openai.completions.create(**fields, stop=[" 9"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == free[: free.index(" 9")]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_logprobs_of_a_chat(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert 0.0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    # The same, from the cache.
    again = server.openai.chat.completions.create(
        model="", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert cached(again.usage) == answer.usage.prompt_tokens - 1
    assert again.choices[0].logprobs == answer.choices[0].logprobs


def test_completions_of_several_prompts_with_echo(server: Server) -> None:
    prompts = ["The sky is", "Grass is"]
    answer = server.openai.completions.create(
        model="", prompt=prompts, n=2, temperature=0, max_tokens=3, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.text.startswith(prompts[choice.index // 2])
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0.0 for value in choice.logprobs.token_logprobs[1:])


def test_token_prompts_report_cached_tokens(server: Server) -> None:
    def ask(ids: list[int]) -> int:
        answer = server.openai.completions.create(model="", prompt=ids, temperature=0, max_tokens=1)
        assert answer.usage.prompt_tokens == len(ids)
        return cached(answer.usage)

    steps = ((100, 0), (600, 100), (600, 599), (300, 299), (100, 99), (1, 0))
    assert [ask(list(range(length))) for length, _ in steps] == [expected for _, expected in steps]
    server.http.post("/flush_cache").raise_for_status()
    assert ask(list(range(100))) == 0


def test_prompt_beyond_the_context_states_both_numbers(server: Server) -> None:
    for length in (8192, 20_000):
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai.completions.create(model="", prompt=[7] * length, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        assert str(length) in caught.value.message
        assert "8192" in caught.value.message


def test_unknown_model_and_bad_values(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.chat.completions.create(model="", messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"

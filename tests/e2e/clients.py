"""LangChain's and LiteLLM's OpenAI clients against a running server: `python tests/e2e/clients.py URL`.

Run by hand, with both installed (`pip install langchain-openai litellm`): they are too heavy for the test environment.
Each check asks for something that the server must do whatever the model is, so any model passes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

SCHEMA: dict[str, Any] = {
    "title": "place",
    "description": "A place",
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Linz", "Graz"]}, "stars": {"type": "integer"}},
    "required": ["city", "stars"],
    "additionalProperties": False,
}
FUNCTION = {"name": "place", "description": "Store a place", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def check_place(place: dict[str, Any]) -> str:
    assert place["city"] in ("Linz", "Graz"), place
    assert isinstance(place["stars"], int), place
    return json.dumps(place)


def langchain(url: str) -> dict[str, Callable[[], str]]:
    """Checks of langchain-openai."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(base_url=url, api_key="none", model="", temperature=0, max_tokens=64, stream_usage=True)  # type: ignore[arg-type]

    def chat() -> str:
        answer = model.invoke("What is the capital of France?")
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] > 0
        assert "cache_read" in answer.usage_metadata["input_token_details"]
        return str(answer.content)

    def stream() -> str:
        chunks = list(model.stream("What is the capital of France?"))
        text = "".join(str(chunk.content) for chunk in chunks)
        assert text == chat(), "the text of a stream is that of a whole answer"
        assert any(chunk.usage_metadata for chunk in chunks)
        return f"{len(chunks)} chunks"

    def tools() -> str:
        tool = {"type": "function", "function": FUNCTION}
        answer = model.bind_tools([tool], tool_choice="required").invoke("Linz has five stars")
        return check_place(answer.tool_calls[0]["args"])

    def streamed_tools() -> str:
        tool = {"type": "function", "function": FUNCTION}
        bound = model.bind_tools([tool], tool_choice="required", parallel_tool_calls=False)
        first, *others = bound.stream("Linz has five stars")
        for chunk in others:
            first += chunk  # type: ignore[assignment]
        return check_place(first.tool_calls[0]["args"])

    def structured() -> str:
        found = model.with_structured_output(SCHEMA, method="json_schema").invoke("Linz has five stars")
        assert isinstance(found, dict)
        return check_place(found)

    def embeddings() -> str:
        # Otherwise it sends token ids of another tokenizer.
        embedder = OpenAIEmbeddings(base_url=url, api_key="none", model="", check_embedding_ctx_length=False)  # type: ignore[arg-type]
        first, second = embedder.embed_documents(["one text", "another"])
        assert len(first) == len(second) > 1
        return f"{len(first)} numbers"

    checks = (chat, stream, tools, streamed_tools, structured, embeddings)
    return {f"langchain {check.__name__}": check for check in checks}


def litellm(url: str) -> dict[str, Callable[[], str]]:
    """Checks of litellm."""
    import litellm as client
    import openai

    name = openai.OpenAI(base_url=url, api_key="none").models.list().data[0].id
    where: dict[str, Any] = {"model": f"openai/{name}", "api_base": url, "api_key": "none"}
    options: dict[str, Any] = {**where, "temperature": 0, "max_tokens": 64}

    def chat() -> str:
        answer = client.completion(messages=QUESTION, **options)
        assert answer.usage.completion_tokens > 0
        assert answer.usage.prompt_tokens_details.cached_tokens is not None
        return str(answer.choices[0].message.content)

    def stream() -> str:
        chunks = list(
            client.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **options)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == chat(), "the text of a stream is that of a whole answer"
        return f"{len(chunks)} chunks"

    def tools() -> str:
        tool = {"type": "function", "function": FUNCTION}
        answer = client.completion(messages=QUESTION, tools=[tool], tool_choice="required", **options)
        return check_place(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))

    def structured() -> str:
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
        answer = client.completion(messages=QUESTION, response_format=form, **options)
        return check_place(json.loads(answer.choices[0].message.content))

    def text() -> str:
        answer = client.text_completion(
            prompt="Once upon a time", **{**options, "model": f"text-completion-openai/{name}"}
        )
        return str(answer.choices[0].text)

    def embeddings() -> str:
        answer = client.embedding(input=["one text", "another"], encoding_format="float", **where)
        assert [item["index"] for item in answer.data] == [0, 1]
        return f"{len(answer.data[0]['embedding'])} numbers"

    def errors() -> str:
        try:
            client.completion(messages=QUESTION, **{**options, "temperature": -5})
        except client.BadRequestError as error:
            return str(error)
        raise AssertionError("a temperature of -5 was accepted")

    checks = (chat, stream, tools, structured, text, embeddings, errors)
    return {f"litellm {check.__name__}": check for check in checks}


def main() -> int:
    """Exit code 0: all checks hold; 1: not so."""
    url = sys.argv[1].rstrip("/") + "/v1"
    num_failed = 0
    for name, check in {**langchain(url), **litellm(url)}.items():
        try:
            print(f"{name:26} {check()!r}", flush=True)
        except Exception:
            num_failed += 1
            print(f"{name:26} FAILED", flush=True)
            traceback.print_exc()
    print("all well" if not num_failed else f"{num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())

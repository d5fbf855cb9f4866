"""Keys, operators' routes, tenants and origins; and what error messages must not tell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from phloem.config import ServerConfig
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

Serve = Callable[..., Running]
KEYS = ServerConfig(api_keys=("alpha", "beta"), admin_api_key="root")
GUESSES = [
    "/generate",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/flush_cache",
    "/abort",
    "/abort_request",
    "/metrics",
    "/v1/messages",
    "/v1/responses",
    "/v1/models",
    "/docs",
    "/openapi.json",
    "/v1/load_lora_adapter",
    "/update_weights_from_disk",
    "/server_info",
    "/get_server_info",
    "/health_generate",
    "/nothing",
    "/",
]


def routes(server: Running) -> set[str]:
    listed = server.http.get("/openapi.json", headers={"Authorization": "Bearer root"}).json()["paths"]
    return {re.sub(r"\{[^}]*\}", "x", path) for path in listed}


def test_every_route_but_health_needs_a_key(serve: Serve) -> None:
    server = serve(FakeEngine(), KEYS)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        credentials: list[dict[str, Any]] = [
            {},
            {"headers": {"Authorization": "Bearer wrong"}},
            {"headers": {"Authorization": "alpha"}},
            {"headers": {"Authorization": "Basic alpha"}},
            {"headers": {"Authorization": "Bearer"}},
            {"headers": {"x-api-key": "wrong"}},
            {"params": {"api_key": "alpha", "key": "alpha"}},
            {"headers": [("Authorization", "Bearer alpha"), ("Authorization", "Bearer wrong")]},
            {"headers": [("Authorization", "Bearer alpha"), ("x-api-key", "wrong")]},
        ]
        paths = routes(server) | set(GUESSES)
        assert len(paths) > 20
        for path in paths - {"/health"}:
            for method in ("GET", "POST"):
                for credential in credentials:
                    response = client.request(method, path, **credential)
                    assert response.status_code == 401, (method, path, credential)
                    assert response.json()["error"]["type"] == "authentication_error"
        assert client.get("/health").status_code == 200
        for header in ({"Authorization": "bearer beta"}, {"x-api-key": "alpha"}):
            assert client.get("/v1/models", headers=header).status_code == 200
        assert not server.engine.requests


def test_operators_routes_need_the_admin_key(serve: Serve) -> None:
    server = serve(FakeEngine(), KEYS)
    root = {"Authorization": "Bearer root"}
    for method, path in (
        ("POST", "/flush_cache"),
        ("POST", "/abort"),
        ("GET", "/server_info"),
        ("POST", "/flush_cache/"),
    ):
        response = server.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        assert server.http.request(method, path, headers=root, json={"abort_all": True}).status_code in (200, 307)
    info = server.http.get("/server_info", headers=root).text
    assert all(key not in info for key in ("alpha", "beta", '"root"'))


def test_admin_key_alone_leaves_generation_open(serve: Serve) -> None:
    server = serve(FakeEngine(), ServerConfig(admin_api_key="root"))
    assert server.chat().status_code == 200
    assert server.post("/flush_cache", {}).status_code == 401


def test_tenants_never_share_unless_asked(serve: Serve) -> None:
    def cached(server: Running, key: str, **fields: Any) -> int:
        answer = (
            server.chat("x" * 100, **fields)
            if not key
            else server.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x" * 100}], **fields},
                headers={"Authorization": f"Bearer {key}"},
            )
        )
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    server = serve(FakeEngine(), KEYS)
    assert cached(server, "alpha") == 0
    assert cached(server, "alpha") > 100
    assert cached(server, "beta") == 0
    assert cached(server, "alpha", cache_salt="s") == 0
    assert cached(server, "alpha", cache_salt="s") > 100
    assert cached(server, "beta", cache_salt="s") == 0
    shared = serve(FakeEngine(), KEYS, share_cache_across_keys=True)
    assert cached(shared, "alpha") == 0
    assert cached(shared, "beta") > 100
    assert cached(shared, "beta", cache_salt="s") == 0
    namespaces = {request.namespace for request in server.engine.requests}
    assert len(namespaces) == 4
    assert all("alpha" not in str(namespace) and "beta" not in str(namespace) for namespace in namespaces)


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 100}]},
    "/v1/completions": {"prompt": "x" * 100},
    "/v1/responses": {"input": "x" * 100},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 5},
    "/v1/embeddings": {"input": "x" * 100, "pooling": "last"},
    "/generate": {"text": "x" * 100},
}


def cached_in(answer: dict[str, Any]) -> int:
    """The count of reused tokens, wherever the API of a route has it."""
    usage = answer.get("meta_info") or answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details["cached_tokens"] if "cached_tokens" in details else details["cache_read_input_tokens"])


@pytest.mark.parametrize("path", ROUTES)
def test_each_route_counts_reuse_and_keeps_tenants_apart(serve: Serve, path: str) -> None:
    """What one key has sent, by any route, another key neither reuses nor sees in any count."""
    server = serve(FakeEngine(), KEYS)

    def ask(key: str, route: str) -> int:
        response = server.post(route, ROUTES[route], headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return cached_in(response.json())

    assert ask("alpha", path) == 0
    assert ask("alpha", path) >= 99
    for route in ROUTES:
        server.post(route, ROUTES[route], headers={"Authorization": "Bearer alpha"})
    assert ask("beta", path) == 0
    assert ask("beta", path) >= 99


def test_pages_of_other_origins_are_refused(serve: Serve) -> None:
    server = serve()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://[", "http://a]b", "\xff"):
        headers = {"Origin": origin.encode("latin-1")}
        assert server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 403
    assert server.http.get("/health", headers={"Origin": server.url}).status_code == 200
    response = server.http.get("/health")
    assert "access-control-allow-origin" not in response.headers


def test_request_ids(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.http.get("/health", headers={"X-Request-Id": "a\tb"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


BAD_GRAMMARS = [
    {"guided_regex": "["},
    {"guided_regex": "(?<=a)b"},
    {"guided_regex": r"\p{X}"},
    {"guided_regex": "(((a{999}){999}){999})"},
    {"guided_regex": "a{100000}"},
    {"guided_regex": "(" * 3000 + ")" * 3000},
    {"guided_regex": ""},
    {"guided_regex": "a" * 600_000},
    {"guided_grammar": "root ::="},
    {"guided_grammar": "start: missing"},
    {"guided_grammar": "root ::= ("},
    {"guided_choice": []},
    {"guided_json": "not json"},
    {"guided_json": 5},
    {"guided_json": False},
    {"guided_json": []},
    {"guided_json": {"type": "foo"}},
    {"guided_json": {"type": "string", "pattern": "["}},
    {"guided_json": {"type": "string", "pattern": "(a{500}){500}"}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"$ref": ""}},
    {"guided_json": {"$ref": "#/nowhere"}},
    {"guided_json": {"$ref": "http://127.0.0.1:9/schema"}},
    {"guided_json": {"$ref": "file:///etc/hostname"}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"not": {"type": "string"}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
    {"response_format": {"type": "xml"}},
    {"response_format": "json"},
    {"guided_regex": "a", "guided_json": {}},
]


def nested(depth: int) -> str:
    """A schema as text, which may nest deeper than this process could build it."""
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def test_bad_grammars_are_refused_and_harm_nobody(serve: Serve) -> None:
    server = serve()
    for fields in [*BAD_GRAMMARS, {"guided_json": nested(120)}, {"guided_json": nested(5000)}]:
        response = server.chat(**fields)
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"], fields
        assert len(response.json()["error"]["message"]) < 600
    assert server.chat().json()["choices"][0]["message"]["content"] == "Hello world"


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("fields", "said", "text"),
    [
        ({"guided_json": True}, "[1]", "[1]"),
        ({"guided_json": {}}, '"x"', '"x"'),
        ({"guided_json": TREE}, '{"v": 1, "next": {"v": 2}}', '{"v": 1, "next": {"v": 2}}'),
        ({"guided_choice": ["yes", "no"]}, "no", "no"),
        ({"guided_regex": "[\x00-\u2e7f]"}, "é", "é"),
        ({"structured_outputs": {"regex": "a+"}}, "aaab", "aaa"),
        ({"regex": "b"}, "b", "b"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "bba", "bba"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', '{"a": [1]}'),
        ({"response_format": {"type": "text"}}, "free", "free"),
    ],
)
def test_good_grammars(serve: Serve, fields: dict[str, Any], said: str, text: str) -> None:
    answer = serve(FakeEngine.saying(said)).chat(**fields).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (text, "stop")


def test_structured_answers_have_no_endless_space(serve: Serve) -> None:
    server = serve(FakeEngine.saying(" " * 400))
    answer = server.chat(response_format={"type": "json_object"}, max_tokens=500).json()["choices"][0]
    outside = re.sub(r'"(?:[^"\\]|\\.)*"?', "s", answer["message"]["content"])
    assert not re.search(r"\s{2}", outside)


def test_replies_tell_nothing_about_the_machine(serve: Serve) -> None:
    server = serve(FakeEngine(fail_after=2))
    bodies: list[Any] = [{"messages": [{"role": "user", "content": "x"}], **fields} for fields in BAD_GRAMMARS]
    bodies += [{}, [], {"messages": "x"}, {"messages": [{"role": "user", "content": "template error"}]}]
    bodies += [{"messages": [{"role": "user", "content": "x"}], "model": "../../etc/passwd"}]
    texts = [server.post("/v1/chat/completions", body).text for body in bodies]
    texts += [server.http.get(path).text for path in ("/v1/models/../../etc/passwd", "/%2e%2e/x", "/nothing")]
    for text in texts:
        assert json.loads(text)["error"]["message"]
        assert not re.search(r"Traceback|File \"|/home/|/usr/|/root/|site-packages|\.py\b", text), text


def test_faults_of_ours_are_500_without_details(serve: Serve) -> None:
    def broken(_request: Any, _index: int) -> str:
        raise RuntimeError("secret detail in /usr/lib/x.py")

    server = serve(FakeEngine(script=broken))
    response = server.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


@pytest.mark.parametrize("state", ["failed", "stopped", "draining"])
def test_an_engine_that_takes_no_requests(serve: Serve, state: str) -> None:
    engine = FakeEngine()
    server = serve(engine)
    engine.current = state  # type: ignore[assignment]
    assert server.http.get("/health").status_code == 503
    response = server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]


def test_a_full_queue_says_when_to_come_back(serve: Serve) -> None:
    server = serve(FakeEngine(max_live=0))
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert response.headers["retry-after"] == "3"

"""docs/http_api.md names every route, and every field of the bodies that it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from phloem.server.anthropic import MessagesBody
from phloem.server.app import create_app
from phloem.server.native import GenerateBody, NativeSampling
from phloem.server.protocol import ChatBody, CompletionBody
from phloem.server.responses import ResponsesBody
from tests.server.fake_engine import FakeEngine

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "http_api.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"[A-Za-z_]+", " ".join(re.findall(r"`([^`]*)`", TEXT))))
NOT_FOR_USERS = {"guided_json", "structured_outputs", "text", "truncation", "reasoning", "verbosity"}


def test_every_route_is_listed() -> None:
    paths = create_app(FakeEngine()).openapi()["paths"]
    assert len(paths) > 15
    assert [path for path in paths if f" {path}`" not in TEXT] == []


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, GenerateBody, NativeSampling, MessagesBody, ResponsesBody])
def test_every_field_is_named(body: type[BaseModel]) -> None:
    assert body.model_fields.keys() - NAMES - NOT_FOR_USERS == set()

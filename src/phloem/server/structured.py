"""Which grammar a request asks for, whichever of the known fields it uses.

Owns the names and the rule that there is one at most. Must not know how grammars are compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic_core import from_json

from phloem.engine.grammar import ANY_JSON_OBJECT, Grammar, choice_regex, json_schema
from phloem.errors import InvalidRequestError
from phloem.server.protocol import Generation, ResponseFormat


class AnswerGrammar(NamedTuple):
    """A grammar and the field that it came from."""

    grammar: Grammar
    param: str


def answer_grammar(body: Generation) -> AnswerGrammar | None:
    """The grammar of the answer, None for free text. Raises InvalidRequestError when fields contradict each other."""
    found = _from_fields(body)
    if body.response_format is not None:
        asked = from_response_format(body.response_format)
        found += [asked] if asked else []
    if len(found) > 1:
        names = " and ".join(item.param for item in found[:2])
        raise InvalidRequestError(f"{names} both shape the answer; send one", param=found[1].param)
    return found[0] if found else None


def from_response_format(form: ResponseFormat) -> AnswerGrammar | None:
    """The grammar of a `response_format`."""
    if form.type == "text":
        return None
    if form.type == "json_object":
        return AnswerGrammar(ANY_JSON_OBJECT, "response_format")
    if form.json_schema is None or "schema_" not in form.json_schema.model_fields_set:
        raise InvalidRequestError(
            "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
        )
    param = "response_format.json_schema.schema"
    return AnswerGrammar(json_schema(form.json_schema.schema_, param), param)


def _from_fields(body: Generation) -> list[AnswerGrammar]:
    """Grammars of the fields that vLLM and SGLang clients send."""
    nested = body.structured_outputs
    schemas = [("guided_json", body.guided_json), ("structured_outputs.json", nested.json_ if nested else None)]
    choices = [("guided_choice", body.guided_choice), ("structured_outputs.choice", nested.choice if nested else None)]
    regexes = [
        ("guided_regex", body.guided_regex),
        ("regex", body.regex),
        ("structured_outputs.regex", nested.regex if nested else None),
    ]
    grammars = [
        ("guided_grammar", body.guided_grammar),
        ("ebnf", body.ebnf),
        ("structured_outputs.grammar", nested.grammar if nested else None),
    ]
    found = [
        AnswerGrammar(json_schema(_parsed(value, name), name), name) for name, value in schemas if value is not None
    ]
    for name, value in choices:
        if value is not None:
            if not value:
                raise InvalidRequestError(f"{name} must hold at least one text", param=name)
            found.append(AnswerGrammar(choice_regex(value), name))
    found += [AnswerGrammar(Grammar("regex", value), name) for name, value in regexes if value is not None]
    return found + [AnswerGrammar(Grammar("ebnf", value), name) for name, value in grammars if value is not None]


def _parsed(schema: Any, param: str) -> Any:
    """A schema that came as text, parsed."""
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema)
    except ValueError as error:
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from None

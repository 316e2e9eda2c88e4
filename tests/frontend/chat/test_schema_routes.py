"""JSON schemas on every route that has a field for them: the same ones are taken, and the same refused."""

from typing import Any

import httpx
import pytest

from frontend.api.anthropic import messages
from frontend.api.ollama.chat import CHAT as ollama
from frontend.api.openai import chat, completions, responses
from frontend.structured_output import grammar as build
from tests.fakes import MODEL
from tests.frontend.api.harness import parse
from tests.frontend.speaking import Model, context_of
from tests.frontend.structured_output.generated import ANSWERS, PARAMETERS

HELLO = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 9}
LOOSE: dict[str, Any] = {"type": "object", "properties": {"word": {"type": "string", "pattern": r"(\w)\1"}}}
EMPTY: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}


def openai_tools(schemas: list[Any], **more: Any) -> list[Any]:
    functions = [{"name": f"f{i}", "parameters": one, **more} for i, one in enumerate(schemas)]
    return [{"type": "function", "function": one} for one in functions]


def flat_tools(schemas: list[Any], **more: Any) -> list[Any]:
    return [{"type": "function", "name": f"f{i}", "parameters": one, **more} for i, one in enumerate(schemas)]


def claude_tools(schemas: list[Any], **more: Any) -> list[Any]:
    return [{"name": f"f{i}", "input_schema": one, **more} for i, one in enumerate(schemas)]


def openai_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def forms(schema: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Returns requests for an answer that keeps to a schema: the API format, and the body."""
    flat = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    prompt = {"model": MODEL, "prompt": "hi", "max_tokens": 9}
    return [
        (chat, ASKED | {"response_format": openai_format(schema)}), (chat, ASKED | {"json_schema": schema}),
        (completions, prompt | {"guided_json": schema}),
        (completions, prompt | {"response_format": openai_format(schema)}),
        (completions, prompt | {"structured_outputs": {"json": schema}}),
        (responses, {"model": MODEL, "input": "hi", "text": flat}),
        (messages, ASKED | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        (messages, ASKED | {"output_format": {"type": "json_schema", "schema": schema}}),
        (ollama, {"model": MODEL, "messages": HELLO, "format": schema}),
    ]  # fmt: skip


async def test_schemas_of_programs_are_taken_on_every_route(qwen: Model) -> None:
    context = context_of(qwen.tokenizer)
    for some in (PARAMETERS[i : i + 16] for i in range(0, len(PARAMETERS), 16)):
        bodies: list[tuple[Any, dict[str, Any]]] = [
            (chat, ASKED | {"tools": openai_tools(some)}), (messages, ASKED | {"tools": claude_tools(some)}),
            (responses, {"model": MODEL, "input": "hi", "tools": flat_tools(some)}),
            (ollama, {"model": MODEL, "messages": HELLO, "tools": openai_tools(some)}),
        ]  # fmt: skip
        for api_format, body in bodies:
            made = (await parse(api_format, body, context)).sampling.grammar
            assert all(f"f{i}" in made for i in range(len(some)))
    for schema in ANSWERS:
        wanted = build.embedded(schema, "x", lenient=True)
        for api_format, body in forms(schema):
            assert wanted in (await parse(api_format, body, context)).sampling.grammar


# path, body; the path of the keyword
COUNTING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", ASKED | {"tools": openai_tools([LOOSE])}, "tools[0].function.parameters"),
    ("/v1/chat/completions", ASKED | {"tools": openai_tools([LOOSE]), "stream": True}, "tools[0].function.parameters"),
    ("/v1/responses", {"model": MODEL, "input": "hi", "tools": flat_tools([LOOSE])}, "tools[0].parameters"),
    ("/v1/messages", ASKED | {"tools": claude_tools([LOOSE])}, "tools[0].input_schema"),
    ("/api/chat", {"model": MODEL, "messages": HELLO, "tools": openai_tools([LOOSE]), "stream": False},
     "tools[0].function.parameters"),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO, "tools": claude_tools([LOOSE])},
     "tools[0].input_schema"),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "hi", "tools": flat_tools([LOOSE])},
     "tools[0].parameters"),
    ("/tokenize", {"model": MODEL, "messages": HELLO, "tools": openai_tools([LOOSE])}, "tools[0].function.parameters"),
    ("/apply-template", {"messages": HELLO, "tools": openai_tools([LOOSE])}, "tools[0].function.parameters"),
    ("/v1/chat/completions", ASKED | {"response_format": openai_format(LOOSE)}, "response_format.json_schema.schema"),
    ("/v1/messages", ASKED | {"output_config": {"format": {"type": "json_schema", "schema": LOOSE}}},
     "output_config.format.schema"),
]  # fmt: skip


def changed(value: Any, schema: Any, **more: Any) -> Any:
    """Returns a copy of a body with another schema, and with more fields beside it."""
    if isinstance(value, dict):
        beside = more if LOOSE in value.values() else {}
        return {key: schema if one == LOOSE else changed(one, schema, **more) for key, one in value.items()} | beside
    return [changed(one, schema, **more) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "body", "field"), COUNTING, ids=[f"{path} {i}" for i, (path, *_) in enumerate(COUNTING)]
)
async def test_routes_name_what_is_not_enforced(path: str, body: dict[str, Any], field: str, qwen: Model) -> None:
    qwen.says = ['{"word": "a"}'] * 3
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        loose = await http.post(path, json=body)
        empty = await http.post(path, json=changed(body, EMPTY))
        strict = await http.post(path, json=changed(body, LOOSE, strict=True))
        plain = await http.post(path, json=changed(body, {"type": "object"}))
    assert loose.status_code == 200, loose.text
    assert loose.headers["X-Sluice-Not-Enforced"] == f"{field}.properties.word.pattern"
    assert empty.status_code in (400, 422) and f"{field}.properties.a.enum" in empty.text
    assert plain.status_code == 200 and "X-Sluice-Not-Enforced" not in plain.headers
    if "output_config" not in body:  # Anthropic's format of answers knows no `strict`
        assert strict.status_code in (400, 422) and f"{field}.properties.word.pattern" in strict.text

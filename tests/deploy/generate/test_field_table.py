"""The tables of docs/fields.md are true: a request for each cell gets the stated answer from the server."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.generate.docs import GENERATING, POOLING, WITHIN, Cell, Does, cells
from frontend.chat.reasoning import ASKS
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.json_schema import request_schema
from frontend.schema.refusal_reasons import WHY
from frontend.text.tokenizer import Tokenizer
from shared.checkpoint import Task
from tests.fakes import MODEL, FakePool, pooling
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.serving import completing, http_client

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
OLLAMA = {"model": MODEL, "stream": False}
TASKS = {"/v1/score": Task("score", labels=1), "/v1/rerank": Task("score", labels=1), "/v1/logprobs": Task("generate")}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 4}, "/v1/chat/completions": CHAT, "/v1/messages": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 4}, "/api/chat": {**OLLAMA, "messages": CHAT["messages"]},
    "/api/generate": {**OLLAMA, "prompt": "ab"}, "/completion": {"prompt": "ab"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"}, "/v1/embeddings": {"input": "ab"},
    "/v1/score": {"text_1": "a", "text_2": "b"}, "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/logprobs": {"prompt": "a", "completion": "b"}, "/api/embed": {"model": MODEL, "input": "ab"},
    "/embedding": {"content": "ab"}, "/generate": {"text": "ab"},
}  # fmt: skip
ODD = {"odd": [1]}  # a value that no field is meant to have
NEEDED = {"stream_options": {"stream": True}}  # field → other fields that the request must have
UNSERVED = {"/infill": 501}  # status of every valid request, because the test's model has no fill-in-the-middle tokens


def served(route: str, folder: Path) -> tuple[FakePool, Tokenizer]:
    tokenizer = small_tokenizer(folder)
    if route in GENERATING:
        return completing(tokenizer), tokenizer
    tokenizer.task = TASKS.get(route, Task("embed"))
    return FakePool(play=pooling(lambda ids: [1.0])), tokenizer


@pytest.mark.parametrize("route", [*GENERATING, *POOLING])
async def test_every_cell_is_true(route: str, tmp_path: Path) -> None:
    request = {**GENERATING, **POOLING}[route]
    pool, tokenizer = served(route, tmp_path)
    served_status = UNSERVED.get(route, 200)
    async with http_client(pool, tokenizer) as http:

        async def ask(name: str, cell: Cell | None, value: object) -> httpx.Response:
            field = {cell.within: {name: value}} if cell and cell.within else {name: value}
            return await http.post(route, json=BODIES[route] | NEEDED.get(name, {}) | field)

        plain = await http.post(route, json=BODIES[route])
        assert plain.status_code == served_status, plain.text
        for name, cell in cells(request).items():
            match cell.does:
                case Does.WORKS:
                    told = await ask(name, cell, sample(name, cell, request))
                    assert is_known(told), (name, told.text)
                case Does.NOTHING:
                    told = await ask(name, cell, sample(name, cell, request))
                    assert told.status_code == served_status and is_known(told), (name, told.text)
                case Does.ONLY:
                    for value in cell.values:
                        assert (await ask(name, cell, value)).status_code == served_status, (name, value)
                    says_why(await ask(name, cell, ODD), name)
                case Does.REFUSED:
                    assert (await ask(name, cell, None)).status_code == served_status, name
                    says_why(await ask(name, cell, ODD), name)
        for name in elsewhere(request):
            told = await ask(name, None, 1)
            if route == "/v1/completions":
                assert told.status_code == 422 and told.json()["error"]["code"] == "unknown_field", (name, told.text)
            else:
                assert name in told.headers["X-Sluice-Ignored-Fields"].split(", "), (name, told.text)


async def test_field_without_effect_changes_nothing_that_a_worker_sees(tmp_path: Path) -> None:
    for route in GENERATING:
        if route in UNSERVED:
            continue
        pool, tokenizer = served(route, tmp_path)
        known = {name: cell for name, cell in cells(GENERATING[route]).items() if cell.does is Does.NOTHING}
        given: dict[str, Any] = {}
        for name, cell in known.items():
            value = sample(name, cell, GENERATING[route])
            given = {
                **given,
                **({cell.within: {**given.get(cell.within, {}), name: value}} if cell.within else {name: value}),
            }
        async with http_client(pool, tokenizer) as http:
            needed = {key: value for name in known for key, value in NEEDED.get(name, {}).items()}
            for more in (needed, needed | given):
                assert (await http.post(route, json=BODIES[route] | more)).status_code == 200, route
        bare, full = (msgspec.structs.replace(one.stream.submit, id=0, group=0) for one in pool.submitted)
        assert bare == full, route


def elsewhere(request: str) -> Iterator[str]:
    """Yields the fields that the request lacks, but another request in the same table of docs/fields.md has."""
    for table in (GENERATING, POOLING):
        if request in table.values():
            yield from sorted({name for other in table.values() for name in cells(other)} - set(cells(request)))


def is_known(told: httpx.Response) -> bool:
    """The model of these tests does not think, so fields that ask for reasoning are named as ignored."""
    ignored = told.headers.get("X-Sluice-Ignored-Fields", "").split(", ")
    return {*ignored} <= {"", "thinking", *ASKS} and not any(
        words in told.text for words in ("unknown_field", "is not supported by this server")
    )


def says_why(told: httpx.Response, name: str) -> None:
    text = re.sub(rf"({'|'.join(WITHIN)})\.", "", told.text)
    assert told.status_code in (400, 422) and f"`{name}`" in text, (name, told.text)
    assert WHY[name] in told.text.replace('\\"', '"'), (name, told.text)


def sample(name: str, cell: Cell, request: str) -> object:
    """Returns a valid value of the field."""
    body = request_schema(WITHIN[cell.within] if cell.within else REQUESTS[request])
    body = body["allOf"][0] if "allOf" in body else body
    return _of(body["properties"][name])


def _of(schema: Mapping[str, Any]) -> object:
    if "default" in schema:
        return schema["default"]
    if "anyOf" in schema or "allOf" in schema:
        return _of((schema.get("anyOf") or schema["allOf"])[0])
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "integer":
            return max(1, schema.get("minimum", 1))
        case "number":
            return min(0.5, schema.get("maximum", 0.5))
        case "string":
            return "a"
        case "boolean":
            return False
        case "array":
            return [_of(schema["items"])]
        case "object":
            return {name: _of(schema["properties"][name]) for name in schema.get("required", ())}
        case _:
            return ODD

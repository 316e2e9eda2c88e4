"""The published OpenAPI description is valid and complete, and needs an API key like every other route."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from jsonschema_rs import Draft202012Validator, meta
from starlette.routing import Match, Route, Router

from frontend.app import ExactRoutes
from frontend.routes.openapi import document
from frontend.routes.openapi_paths import REQUESTS, RESPONSES
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.serving import app_over

METHODS = {"get", "post", "put", "delete", "patch"}


async def test_every_route_is_described_and_nothing_else(tokenizer: Tokenizer) -> None:
    routes = [route for route in app_over(FakePool(), tokenizer).routes if isinstance(route, Route)]
    there = {(route.path.replace(":path", ""), method) for route in routes for method in route.methods or ()}
    told = {
        (path, method.upper()) for path, item in document()["paths"].items() for method in item if method in METHODS
    }
    assert {pair for pair in there if pair[1] != "HEAD"} == told


def test_the_document_is_valid() -> None:
    said = document()
    schemathesis.openapi.from_dict(said).validate()
    for name, schema in said["components"]["schemas"].items():
        assert meta.is_valid(schema), name
    assert set(references(said)) <= {f"#/components/schemas/{name}" for name in said["components"]["schemas"]}
    assert {*REQUESTS, *RESPONSES} <= said["components"]["schemas"].keys()
    assert set(REQUESTS).isdisjoint(RESPONSES)
    methods = [item[method] for item in said["paths"].values() for method in METHODS & item.keys()]
    bodies = [route for route in methods if "requestBody" in route]
    ids = [route["operationId"] for route in bodies]
    assert len(ids) == len(set(ids)) and set(REQUESTS) <= set(ids)


def references(value: Any) -> list[str]:
    match value:
        case {"$ref": str(there)}:
            return [there]
        case dict():
            return [found for inner in value.values() for found in references(inner)]
        case list():
            return [found for inner in value for found in references(inner)]
        case _:
            return []


async def test_it_is_served_to_who_may_come_in(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    keys.chmod(0o600)
    transport = httpx.ASGITransport(app_over(FakePool(), tokenizer, api_keys=str(keys)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        denied, given = await asyncio.gather(
            http.get("/openapi.json"), http.get("/openapi.json", headers={"X-Api-Key": "sk-one"})
        )
    assert (denied.status_code, given.status_code) == (401, 200)
    said = given.json()
    request = said["components"]["schemas"]["CompletionRequest"]
    valid = Draft202012Validator({**request, "components": said["components"]}).is_valid
    assert valid({"model": "m", "prompt": ["a", [1, 2]], "max_tokens": 0, "echo": True, "seed": None})
    assert not valid({"model": "m"}) and not valid({"model": "m", "prompt": "a", "use_beam_search": True})


def test_request_field_has_a_description() -> None:
    schemas = document()["components"]["schemas"]
    bare = [
        (kind, name) for kind in REQUESTS for name, shape in schemas[kind]["properties"].items()
        if not shape["description"]
    ]  # fmt: skip
    assert bare == []
    assert "API key" in schemas["MessageRequest"]["properties"]["priority"]["description"]


def test_process_that_has_read_all_types_ends_without_a_crash() -> None:
    """msgspec 0.22 frees a pattern twice at exit if two request types have the pattern in a union with a list."""
    script = "from frontend.routes import openapi; openapi.document()"
    ended = [subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3]).returncode for _ in range(6)]
    assert ended == [0] * 6


async def test_table_of_exact_paths_has_the_route_that_the_router_finds(tokenizer: Tokenizer) -> None:
    routes = [route for route in app_over(FakePool(), tokenizer).routes if isinstance(route, Route)]
    found = ExactRoutes(Router(routes), routes).exact
    assert len(found) > len(routes) / 2 and ("POST", "/v1/chat/completions") in found
    for (method, path), route in found.items():
        scope = {"type": "http", "method": method, "path": path}
        assert route is next(one for one in routes if one.matches(scope)[0] is Match.FULL), (method, path)

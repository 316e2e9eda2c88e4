"""Generates docs/fields.md: what each field of a request does on each route.

All facts come from the types that bodies are parsed into.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
from msgspec import inspect as nodes

from deploy.reference.markdown import table
from frontend.api.ollama.options import Options
from frontend.api.requests.request_model import RequestModel, bare, fields_of
from frontend.api.requests.request_schema import description, refused_fields
from frontend.api.requests.unsupported import WHY
from frontend.api.routes.body_types import REQUESTS
from frontend.api.sglang.fields import SamplingParams

GENERATING: Mapping[str, str] = {  # route that generates → type of its request
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/messages": "MessageRequest",
    "/api/chat": "OllamaChatRequest",
    "/api/generate": "OllamaTextRequest",
    "/completion": "LlamaCppCompletionRequest",
    "/infill": "InfillRequest",
    "/generate": "SglangGenerateRequest",
}
# fields that are objects with fields of their own
WITHIN: Mapping[str, type[RequestModel]] = {"options": Options, "sampling_params": SamplingParams}
POOLING: Mapping[str, str] = {  # route that answers with vectors or scores → type of its request
    "/v1/embeddings": "EmbeddingRequest",
    "/v1/score": "ScoreRequest",
    "/v1/rerank": "RerankRequest",
    "/api/embed": "EmbedRequest",
    "/embedding": "LlamaCppEmbeddingRequest",
}
NO_EFFECT = ("Accepted, no effect", "No effect")  # how the description of a field without effect begins


class Does(Enum):
    WORKS = "works"
    NOTHING = "no effect"
    ONLY = "only"  # the field accepts only values that leave an unsupported feature off
    REFUSED = "refused"


@dataclass(frozen=True)
class Cell:
    """The effect of a field on a route. values: the accepted values, for ONLY; within: the object that contains the
    field"""

    does: Does
    values: tuple[object, ...] = ()
    within: str = ""

    def __str__(self) -> str:
        match self.does:
            case Does.WORKS:
                return f"in `{self.within}`" if self.within else "✓"
            case Does.NOTHING:
                return "·"
            case Does.ONLY:
                return " / ".join(f"`{msgspec.json.encode(one).decode()}`" for one in self.values)
            case Does.REFUSED:
                return "✗"


def cells(request: str) -> Mapping[str, Cell]:
    """Returns the effect of each field of a request, by name. Fields inside the objects of WITHIN are included."""
    found = dict(_of(REQUESTS[request], ""))
    for name, kind in WITHIN.items():
        if name in found and found[name].does is Does.WORKS:
            found = {**dict(_of(kind, name)), **found}
    return found


def _of(kind: type[RequestModel], within: str) -> Iterator[tuple[str, Cell]]:
    refused = set(refused_fields(kind))
    for name, field in fields_of(kind).items():
        silent = isinstance(bare(field.type), nodes.AnyType) and not description(field)
        if name in refused:
            yield name, Cell(Does.REFUSED, (), within)
        elif silent or description(field).startswith(NO_EFFECT):
            yield name, Cell(Does.NOTHING, (), within)
        else:
            yield name, Cell(Does.WORKS, (), within)
    for name, values in kind.ONLY.items():
        yield name, Cell(Does.ONLY, tuple(values), within)


def generating() -> str:
    return _table(GENERATING)


def pooling() -> str:
    return _table(POOLING)


def _table(routes: Mapping[str, str]) -> str:
    by_route = {route: cells(request) for route, request in routes.items()}
    names = sorted({name for known in by_route.values() for name in known})
    rows = []
    for name in names:
        row = [known.get(name) for known in by_route.values()]
        unsupported = any(cell and cell.does in (Does.ONLY, Does.REFUSED) for cell in row)
        rows.append([f"`{name}`", *(str(cell or "") for cell in row), WHY[name] if unsupported else ""])
    return table(["field", *(f"`{route}`" for route in routes), "why not"], rows)


TABLES = {"fields of routes that generate": generating, "fields of routes that pool": pooling}

"""Generates the tables of docs/ from the same definitions that the programs use.

TABLES names for each marker the function that returns its Markdown.
"""

import ast
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.cli.commands import COMMANDS, TOOLS
from deploy.reference.shapes import default, inner, merged, words
from deploy.supervisor.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from frontend import errors
from frontend.api.anthropic import messages
from frontend.api.openai import completions
from frontend.api.openapi import ERRORS, REQUESTS, document
from frontend.api.receipts.receipt import Receipt
from frontend.api.request_model import RequestModel
from frontend.api.request_schema import Schema, ignored_fields, refused_fields, request_schema
from frontend.observability.metrics import PrometheusMetrics
from frontend.server import http_protocol
from frontend.workers.listener import WireCounters
from frontend.workers.pool import rejection_error
from frontend.workers.status import ConnectionState, WorkerStatus
from shared import messages as m
from shared.config import Settings
from shared.flags import Flag, all_flags
from worker.observability.metrics import Metrics

ROOT = Path(__file__).parents[2]
API_FORMATS = {
    "completions": "CompletionRequest",
    "chat": "ChatCompletionRequest",
    "responses": "ResponseRequest",
    "messages": "MessageRequest",
}
T = TypeVar("T")
STATUS = m.Status(0, 0, "", "", "", m.WorkerState.READY)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def sentence(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


# api.md


def routes() -> str:
    paths = document()["paths"]
    rows = [
        [f"`{method.upper()} {path}`", what["summary"], "" if what.get("security") == [] else "yes"]
        for path, item in paths.items()
        for method, what in item.items()
        if method in ("get", "post")
    ]
    return table(["route", "", "asks for a key"], rows)


def fields() -> str:
    """Lists the request fields of all API formats; a field that differs between formats has a row for each variant."""
    rows: dict[tuple[str, str, str], tuple[list[str], str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, shape, value in effective(request):
            formats, _ = rows.setdefault((name, words(shape), value), ([], shape["description"]))
            formats.append(api_format)
    names = list(dict.fromkeys(name for name, _, _ in rows))
    return table(
        ["field", "value", "default", *API_FORMATS, ""],
        [
            [f"`{name}`", kind, value, *("✓" if api_format in formats else "" for api_format in API_FORMATS), meaning]
            for (name, kind, value), (formats, meaning) in sorted(rows.items(), key=lambda row: names.index(row[0][0]))
        ],
    )


def effective(request: str) -> Iterator[tuple[str, Schema, str]]:
    """Yields the fields that have an effect: name, schema, default."""
    kind, body = REQUESTS[request], request_schema(REQUESTS[request])
    for name, shape in body["properties"].items():
        if name not in kind.ONLY and name not in ignored_fields(kind):
            yield name, shape, "required" if name in body["required"] else default(shape)


def ignored() -> str:
    return _grouped(lambda request: dict.fromkeys(ignored_fields(REQUESTS[request]), "anything"))


def only() -> str:
    """Lists the fields of features that are not offered, and the values that are accepted for them."""
    return _grouped(lambda request: {name: words({"enum": values}) for name, values in REQUESTS[request].ONLY.items()})


def refused() -> str:
    return _grouped(lambda request: dict.fromkeys(refused_fields(REQUESTS[request]), "`null`"))


def _grouped(values: Callable[[str], Mapping[str, str]]) -> str:
    """Makes a table with one row for all fields that have the same value in the same API formats.

    values: returns the value of each field of a request.
    """
    formats: dict[tuple[str, str], list[str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, value in values(request).items():
            formats.setdefault((name, value), []).append(api_format)
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, value), has in formats.items():
        rows.setdefault((value, ", ".join(has)), []).append(f"`{name}`")
    return table(["fields", "value", "in"], [[", ".join(names), value, has] for (value, has), names in rows.items()])


def nested() -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, shape, _ in effective(request):
            for path, (kind, required) in merged(inner(name, shape)).items():
                found.setdefault((path, kind, "yes" if required else ""), []).append(api_format)
    rows = [[f"`{path}`", kind, need, ", ".join(has)] for (path, kind, need), has in sorted(found.items())]
    return table(["field", "value", "needed in its object", "in"], rows)


def small() -> str:
    """Lists the body fields of the routes that only count or convert tokens."""
    parts = {
        "/v1/responses/input_tokens": "InputRequest",
        "/v1/messages/count_tokens": "CountRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    return table(["route", "field", "value", "default"], [row[:4] for row in _by_route(parts)])


def pooling() -> str:
    """Lists the body fields of the routes that answer with vectors or scores."""
    parts = {"/v1/embeddings": "EmbeddingRequest", "/v1/score": "ScoreRequest", "/v1/rerank": "RerankRequest"}
    return table(["route", "field", "value", "default", ""], _by_route(parts))


def logprobs() -> str:
    """Lists the body fields of the route that scores tokens."""
    rows = [row[1:] for row in _by_route({"/v1/logprobs": "LogprobsRequest"})]
    return table(["field", "value", "default", ""], rows)


def verify() -> str:
    """Lists the body fields of the route that checks receipts, and those of a receipt."""
    rows = [row[1:] for row in _by_route({"/v1/receipts/verify": "VerifyRequest"})]
    return table(["field", "value", "default", ""], rows)


def receipt() -> str:
    """Lists the fields of a receipt."""
    shape = request_schema(Receipt)["properties"]
    return table(["field", "value", ""], [[f"`{name}`", words(one), one["description"]] for name, one in shape.items()])


def _by_route(requests: Mapping[str, str]) -> list[list[str]]:
    return [
        [f"`{route}`", f"`{name}`", words(shape), value, shape["description"]]
        for route, request in requests.items()
        for name, shape, value in effective(request)
    ]


def failures() -> str:
    kinds: dict[int, tuple[str, str]] = {one.status: (one.kind, "") for one in early()}
    for error in _subclasses(errors.SluiceError):
        openai, anthropic = completions.error(error(""), ""), messages.error(error(""), "")
        kinds[error.status] = _type(openai), _type(anthropic)
    when = {**ERRORS, 404: "No such route, or no such name in it", 405: "The route has another method"}
    rows = [
        [str(status), when[status], *(f"`{kind}`" if kind else "as OpenAI's" for kind in kinds[status])]
        for status in sorted(when)
    ]
    return table(["status", "when", "OpenAI's `type`", "Anthropic's `type`"], rows)


def early() -> list[http_protocol.EarlyRefusal]:
    """Returns the refusals before a route is known, which all have OpenAI's format."""
    return [one for one in vars(http_protocol).values() if isinstance(one, http_protocol.EarlyRefusal)]


def codes() -> str:
    """Lists every `code` that an error can have, by HTTP status."""
    found: dict[int, set[str]] = {}
    tagged = ((errors.Unprocessable.status, one.UNKNOWN_TYPE) for one in _subclasses(RequestModel))
    for status, code in (*_written(), *tagged, *((one.status, one.code) for one in early()), *_workers()):
        found.setdefault(status, set()).add(code)
    rows = [[str(status), ", ".join(f"`{code}`" for code in sorted(found[status]))] for status in sorted(found)]
    return table(["status", "`code`"], rows)


def _written() -> Iterator[tuple[int, str]]:
    """Yields the status and code of every error that the frontend's source constructs with a code."""
    classes = {error.__name__: error.status for error in _subclasses(errors.SluiceError)}
    classes["_fail"] = errors.Overloaded.status  # in pool.py, for a request that was not admitted
    for file in sorted((ROOT / "frontend").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            for word in node.keywords if isinstance(node, ast.Call) and name in classes else ():
                if word.arg == "code" and isinstance(word.value, ast.Constant):
                    yield classes[name], str(word.value.value)


def _workers() -> Iterator[tuple[int, str]]:
    for reason in m.Refusal:
        error = rejection_error(m.Rejected(0, reason, ""))
        yield error.status, error.code or ""


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _type(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["type"])


# flags.md


def flags() -> str:
    parts = []
    for record in dict.fromkeys(flag.record for flag in all_flags()):
        about = sentence(str(type(getattr(Settings(), record)).__doc__))
        rows = [_flag(flag) for flag in all_flags() if flag.record == record]
        head = ["flag, variable", "default", "value", "", "read by"]
        parts.append(f"### {record}\n\n{about}.\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _flag(flag: Flag) -> list[str]:
    meta, kind = flag.field.metadata, flag.field.type
    no = " `--no-" + flag.option[2:] + "`" if kind is bool else ""
    value = {bool: "on or off", int: "integer", float: "number"}.get(typing.cast(Any, kind), "text")
    if meta["choices"]:
        value = " / ".join(f"`{choice}`" for choice in meta["choices"])
    bounds = {"above": "above", "at_least": "from", "at_most": "to"}
    limits = " ".join(f"{word} {meta[name]:,}" for name, word in bounds.items() if meta[name] is not None)
    value = f"{value} {limits}".strip() + (f", {meta['unit']}" if meta["unit"] else "")
    plain = {"True": "on", "False": "off", "": ""}.get(str(flag.field.default), f"`{flag.field.default}`")
    shown = flag.field.metadata["shown"] or plain
    return [f"`{flag.option}`{no}<br>`{flag.variable}`", shown, value, meta["help"], _readers(flag)]


def _readers(flag: Flag) -> str:
    roles = {"worker": WORKER_FLAGS, "frontend": FRONTEND_FLAGS}
    return ", ".join(role for role, own in roles.items() if flag in own) or "launcher"


def commands() -> str:
    rows_by_name = {name: command.about for name, command in COMMANDS.items()} | {
        name: tool.about for name, tool in TOOLS.items()
    }
    return table(["command", ""], [[f"`sluice {name}`", about] for name, about in rows_by_name.items()])


# metrics.md


def frontend_metrics() -> str:
    metrics = PrometheusMetrics()
    members = [WorkerStatus(address, ConnectionState.READY, "ready", STATUS) for address in "ab"]
    return _metrics(metrics.text(WireCounters(), members), _labels(metrics.registry))


def worker_metrics() -> str:
    metrics = Metrics()
    return _metrics(generate_latest(metrics.scrape_registry(_Idle())), _labels(metrics.registry))


class _Idle:
    def status(self) -> m.Status:
        return STATUS


def _metrics(text: bytes, labels: Mapping[str, Sequence[str]]) -> str:
    rows = []
    for family in text_string_to_metric_families(text.decode()):
        if family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        seen = {label for sample in family.samples for label in sample.labels} - {"le"}
        named = sorted(seen | set(labels.get(family.name, ())))
        rows.append(
            [f"`{name}`", family.type, ", ".join(f"`{label}`" for label in named), sentence(family.documentation)]
        )
    return table(["metric", "type", "labels", ""], sorted(rows))


def _labels(registry: CollectorRegistry) -> Mapping[str, Sequence[str]]:
    """Returns the label names of each metric family, including families without samples."""
    return {
        name: getattr(collector, "_labelnames", ())
        for collector, names in registry._collector_to_names.items()
        for name in names
    }


def alerts() -> str:
    groups = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text())["groups"]
    rows = [
        [f"`{rule['alert']}`", rule["labels"]["severity"], sentence(rule["annotations"]["description"])]
        for group in groups
        for rule in group["rules"]
    ]
    return table(["alert", "severity", "what it means"], rows)


# architecture.md


def wire() -> str:
    ways = {"frontend → worker": m.Request, "worker → frontend": m.Event}
    rows = [
        [f"`{kind.__name__}`", way, ", ".join(f"`{name}`" for name in kind.__struct_fields__), _first(kind)]
        for way, union in ways.items()
        for kind in typing.get_args(union)
    ]
    return table(["message", "way", "fields", ""], rows)


def _first(kind: type) -> str:
    return sentence(str(kind.__doc__).split("\n\n")[0])


TABLES: Mapping[str, Callable[[], str]] = {
    "routes": routes, "fields": fields, "ignored": ignored, "only": only, "refused": refused, "nested": nested,
    "small": small, "pooling": pooling, "logprobs": logprobs, "verify": verify, "receipt": receipt,
    "failures": failures, "codes": codes, "flags": flags,
    "commands": commands, "frontend metrics": frontend_metrics, "worker metrics": worker_metrics, "alerts": alerts,
    "wire": wire,
}  # fmt: skip

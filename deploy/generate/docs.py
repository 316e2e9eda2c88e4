"""Generates the tables of docs/ from the same definitions that the programs use.

TABLES maps each marker to the function that returns its Markdown.
"""

import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import inspect as nodes
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.cli.main import COMMANDS, TOOLS
from deploy.generate import docs_api
from deploy.generate.docs_api import sentence, table
from deploy.launcher.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from frontend.api.ollama.types import Options
from frontend.api.sglang.types import SamplingParams
from frontend.kept.usage import Stored
from frontend.observability.metrics import PrometheusMetrics
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.base import RequestModel, bare, fields_of
from frontend.schema.json_schema import description, refused_fields
from frontend.schema.refusal_reasons import WHY
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import ConnectionState, WorkerStatus
from shared import messages as m
from shared.config.flags import Flag, all_flags
from shared.config.settings import Settings
from shared.metrics_page import declared_labels
from worker.engine.metrics import Metrics

# Generates docs/fields.md: what each field of a request does on each route.
#
# All facts come from the types that bodies are parsed into.

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


FIELD_TABLES = {"fields of routes that generate": generating, "fields of routes that pool": pooling}


ROOT = Path(__file__).parents[2]
STATUS = m.Status(0, 0, "", "", "", m.WorkerState.READY)

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
    metrics.models[""].flush(ConnectionCounters(), members)
    metrics.stored = lambda: {"name": Stored()}
    return _metrics(metrics.text(), declared_labels(metrics.registry))


def worker_metrics() -> str:
    metrics = Metrics()
    return _metrics(generate_latest(metrics.scrape_registry(_Idle())), declared_labels(metrics.registry))


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
    **docs_api.API_TABLES, **FIELD_TABLES, "flags": flags, "commands": commands, "frontend metrics": frontend_metrics,
    "worker metrics": worker_metrics, "alerts": alerts, "wire": wire,
}  # fmt: skip


# `python -m deploy.generate.docs`: regenerates the tables of docs/, in a checkout.
#
# `tables` generates the text between `<!-- made: NAME -->` and `<!-- end -->`; people write the rest.

DOCS = ROOT / "docs"
MADE = re.compile(r"(?P<begin><!-- made: (?P<name>[a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """Returns the page with up-to-date tables. Raises KeyError for an unknown marker."""
    return MADE.sub(lambda part: f"{part['begin']}\n{TABLES[part['name']]()}\n\n", text)


def main(docs: Path = DOCS) -> int:
    for page in sorted(docs.glob("*.md")):
        before = page.read_text()
        if (after := renewed(before)) != before:
            page.write_text(after)
            print(f"{page} was renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

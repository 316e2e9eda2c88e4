"""Generates the tables of docs/ from the same definitions that the programs use.

TABLES maps each marker to the function that returns its Markdown.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.cli.commands import COMMANDS, TOOLS
from deploy.reference import api, field_table
from deploy.reference.markdown import sentence, table
from deploy.supervisor.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from frontend.observability.metrics import PrometheusMetrics
from frontend.workers.listener import WireCounters
from frontend.workers.status import ConnectionState, WorkerStatus
from shared import messages as m
from shared.config import Settings
from shared.flags import Flag, all_flags
from shared.logs.prometheus_adapter import declared_labels
from worker.observability.metrics import Metrics

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
    metrics.models[""].flush(WireCounters(), members)
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
    **api.TABLES, **field_table.TABLES, "flags": flags, "commands": commands, "frontend metrics": frontend_metrics,
    "worker metrics": worker_metrics, "alerts": alerts, "wire": wire,
}  # fmt: skip

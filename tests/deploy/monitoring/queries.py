"""The rules, alerts and dashboard of deploy/monitoring, and every query in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"


def read(file: str) -> Any:
    return yaml.safe_load((MONITORING / file).read_text())


def rules(file: str) -> Iterator[dict[str, Any]]:
    for group in read(file)["groups"]:
        yield from group["rules"]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana exports it."""
    content: dict[str, Any] = json.loads((MONITORING / "grafana" / "sluice.json").read_text())
    return content


def queries() -> Iterator[str]:
    yield from (rule["expr"] for file in ("recording.yml", "alerts.yml") for rule in rules(file))
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (entry["expr"] for entry in dashboard()["annotations"]["list"])

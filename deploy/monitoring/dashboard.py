"""The Grafana dashboard as one table; `python -m deploy.monitoring.dashboard` writes it as grafana/sluice.json.

Frontends export what clients see, workers what they compute; each query names its job. A test compares the metric names
here with those that a running server exports.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "grafana" / "sluice.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, TILE = 24, 8, 4  # Grafana's grid

F = 'job="sluice-frontend",instance=~"$frontend",model_name=~"$model"'
W = 'job="sluice-worker",instance=~"$worker",model_name=~"$model"'
VARIABLES = {  # the choices that a reader of the dashboard has
    "model": 'label_values(sluice_build_info{job=~"sluice-.*"}, model_name)',
    "frontend": 'label_values(up{job="sluice-frontend"}, instance)',
    "worker": 'label_values(up{job="sluice-worker"}, instance)',
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard. A `stat` shows the last value, a `timeseries` shows all values.

    lines: the legend of each line → its query.
    """

    title: str
    unit: str  # in Grafana's words, for example s, short, percentunit, reqps
    lines: dict[str, str]
    kind: str = "timeseries"
    red: float | None = None  # this value and larger ones are bad
    good: float | None = None  # values below this one are bad


def rate(metric: str, job: str = F, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(sluice_{metric}{{{job}}}[$__rate_interval]))"


def quantiles(metric: str, job: str = F) -> dict[str, str]:
    def line(q: float) -> str:
        return f"histogram_quantile({q}, {rate(f'{metric}_seconds_bucket', job, by='le')})"

    return {"p50": line(0.5), "p95": line(0.95), "p99": line(0.99)}


def tile(title: str, unit: str, query: str, **more: Any) -> Panel:
    return Panel(title, unit, {"": query}, kind="stat", **more)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        tile("Workers ready", "short", f"min(sluice_workers_ready{{{F}}})", good=1),
        tile("Frontends connected", "short", f"max(sluice_frontends{{{W}}})", good=1),
        tile("Running", "short", f"sum(sluice_num_requests_running{{{W}}})"),
        tile("Waiting", "short", f"sum(sluice_num_requests_waiting{{{W}}})"),
        tile("Tokens generated", "short", f"sum(increase(sluice_generation_tokens_total{{{F}}}[$__range]))"),
        tile("Streams lost", "short", f"sum(increase(sluice_streams_lost_total{{{F}}}[$__range]))", red=1),
    ),
    "What clients see": (
        Panel("Time to the first token", "s", quantiles("time_to_first_token")),
        Panel("Time between two tokens", "s", quantiles("inter_token_latency")),
        Panel("Whole requests", "s", quantiles("e2e_request_latency")),
        Panel("Requests that ended with success", "reqps", {
            "{{finished_reason}}": rate("request_success_total", F, "finished_reason"),
        }),
        Panel("Rejected (503), cut off, refused", "reqps", {
            "503 {{reason}}": rate("rejected_total", F, "reason"),
            "cut off: {{reason}}": rate("aborts_total", F, "reason"),
            "refused: {{reason}}": rate("http_refused_total", F, "reason"),
        }),
        Panel("Tokens a second", "short", {
            "generated": rate("generation_tokens_total"),
            "prompts": rate("prompt_tokens_total"),
        }),
    ),
    "Where the time goes": (
        Panel("Waiting in the queue", "s", quantiles("request_queue_time", W)),
        Panel("Prefill", "s", quantiles("request_prefill_time", W)),
        Panel("Decode", "s", quantiles("request_decode_time", W)),
        Panel("A step of the worker, mean", "s", {
            "{{part}}": " / ".join(rate(f"step_duration_seconds_{end}", W, "part") for end in ("sum", "count")),
        }),
        Panel("Tokens in a step, mean", "short", {
            "tokens": " / ".join(rate(f"iteration_tokens_total_{end}", W) for end in ("sum", "count")),
        }),
        Panel("Age of the last step", "s", {"{{instance}}": f"sluice_worker_last_step_age_seconds{{{W}}}"}, red=15),
    ),
    "Scheduler and memory": (
        Panel("Sequences", "short", {
            "running {{instance}}": f"sluice_num_requests_running{{{W}}}",
            "waiting {{instance}}": f"sluice_num_requests_waiting{{{W}}}",
        }),
        Panel("K/V pages owned by requests", "percentunit", {
            "{{instance}}": f"sluice_kv_cache_usage_perc{{{W}}}",
        }, red=0.95),
        Panel("Prompt tokens found in the prefix cache", "percentunit", {
            "found": f"{rate('prefix_cache_hits_total', W)} / {rate('prefix_cache_queries_total', W)}",
        }),
        Panel("Preemptions", "ops", {"{{instance}}": rate("num_preemptions_total", W, "instance")}),
        Panel("Requests that failed in the worker", "reqps", {
            "{{outcome}}": rate("request_failed_total", W, "outcome"),
        }),
        Panel("Requests that a worker did not admit", "reqps", {
            "{{reason}}": rate("submits_rejected_total", W, "reason"),
        }),
    ),
    "Crashes and repairs": (
        Panel("Epoch of the worker", "short", {"{{instance}}": f"sluice_worker_epoch{{{W}}}"}),
        Panel("Streams", "ops", {
            "resumed": rate("streams_resumed_total"),
            "resumed at another worker": rate("streams_moved_total"),
            "lost": rate("streams_lost_total"),
        }),
        Panel("The wire", "ops", {
            "gaps": rate("bus_gaps_total"),
            "resyncs": rate("resyncs_total"),
            "unsent": rate("wire_unsent_total", W),
            "garbage": rate("wire_garbage_total", W),
            "refused keys": rate("wire_refused_total", W),
        }),
        Panel("Workers ready and known", "short", {
            "ready {{instance}}": f"sluice_workers_ready{{{F}}}",
            "known {{instance}}": f"sluice_workers{{{F}}}",
        }),
        Panel("Frontends", "short", {
            "connected {{instance}}": f"sluice_frontends{{{W}}}",
            "gone, total {{instance}}": f"sluice_leases_reaped_total{{{W}}}",
        }),
        Panel("Event loop delay, p99", "s", {
            "{{instance}}": f"histogram_quantile(0.99, {rate('frontend_loop_lag_seconds_bucket', F, 'le, instance')})",
        }, red=0.1),
        Panel("Versions that run", "short", {
            "frontends {{version}} {{commit}}": f"count by (version, commit) (sluice_build_info{{{F}}})",
            "workers {{version}} {{commit}}, torch {{torch}}":
                f"count by (version, commit, torch) (sluice_build_info{{{W}}})",
        }),
    ),
    "API keys": (
        Panel("Requests by key", "reqps", {"{{key}}": rate("key_requests_total", F, "key")}),
        Panel("Prompt tokens by key", "short", {"{{key}}": rate("key_prompt_tokens_total", F, "key")}),
        Panel("Generated tokens by key", "short", {"{{key}}": rate("key_generation_tokens_total", F, "key")}),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "uid": "sluice",
        "title": "Sluice",
        "tags": ["sluice", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), *(_variable(name, query) for name, query in VARIABLES.items())]},
        "annotations": {"list": [_restarts()]},
        "panels": list(_panels()),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _restarts() -> dict[str, Any]:
    query = 'changes(sluice_worker_epoch{job="sluice-worker"}[1m]) > 0'
    return {"name": "worker restarted", "datasource": SOURCE, "enable": True, "expr": query, "iconColor": "red"}


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for name, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": name, "gridPos": _box(0, top, WIDTH, 1), "panels": []}
        top += 1
        wide, high = (WIDTH // len(panels), TILE) if panels[0].kind == "stat" else (WIDTH // 3, HEIGHT)
        for i, panel in enumerate(panels):
            number += 1
            column, line = i % (WIDTH // wide), i // (WIDTH // wide)
            yield {"id": number, "gridPos": _box(column * wide, top + line * high, wide, high), **_panel(panel)}
        top += -(-len(panels) * wide // WIDTH) * high


def _box(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "red" if panel.good is not None else "green", "value": None}]
    if panel.good is not None:
        steps.append({"color": "green", "value": panel.good})
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend or "now"}
            for i, (legend, query) in enumerate(panel.lines.items())
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")

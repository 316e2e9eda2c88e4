"""Checks a server with two frontends under Prometheus: sums are exact, and alerts fire exactly when they should."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.monitoring.queries import dashboard, queries
from tests.e2e.server import Server, free_port, serving
from tests.ops.programs import Prometheus, prometheus, until

# Counters with a label do not exist before their first increment.
INITIALLY_ABSENT = {"submits_rejected_total", "rejected_total", "aborts_total"}
INITIALLY_ABSENT |= {"http_refused_total", "request_failed_total"}
INITIALLY_ABSENT |= {"key_requests_total", "key_prompt_tokens_total", "key_generation_tokens_total"}
INITIALLY_ABSENT |= {"key_storage_refused_total", "key_stored_bytes", "key_kept_answers"}


def monitoring(folder: Path) -> None:
    worker_port = free_port()
    flags = ("--frontends", "2", "--worker-metrics-port", str(worker_port), "--access-log", "text")
    with ExitStack() as stack:
        server = stack.enter_context(serving("demo", folder / "serve.log", *flags))
        frontend_port = int(server.url.rpartition(":")[2])
        monitor = stack.enter_context(prometheus(folder / "prometheus", [frontend_port], [worker_port]))
        until(lambda: monitor.value("sum(up)") == 2, "both targets")
        print("up == 1 for", [metric["job"] for metric, value in monitor.series("up") if value == 1], flush=True)
        sent = _send(server, 40)
        _check_sums(monitor, sent)
        _check_spread(server)
        _check_names(monitor)
        _check_dashboard(monitor)
        time.sleep(4)  # longer than the delay of an alert in this test
        assert not monitor.firing(), monitor.firing()
        _pause_and_resume(server, monitor)
        _kill(server, monitor)
        more = _send(server, 10)
        _check_sums(monitor, {name: sent[name] + more[name] for name in sent})


def _send(server: Server, count: int) -> dict[str, int]:
    """Sends requests of known lengths, each on its own connection, so that both frontends receive some."""
    totals = dict.fromkeys(("requests", "prompt", "generated"), 0)
    for i in range(count):
        prompt, tokens = list(range(5, 8 + i)), 4 + i % 7
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": i % 2 == 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        for name, value in zip(totals, (1, len(prompt), tokens), strict=True):
            totals[name] += value
    return totals


def _check_sums(monitor: Prometheus, sent: dict[str, int]) -> None:
    names = {"requests": "request_success", "prompt": "prompt_tokens", "generated": "generation_tokens"}

    def of_frontends() -> dict[str, float]:
        return {quantity: monitor.value(f"sum(sluice_{name}_total)") for quantity, name in names.items()}

    def of_worker() -> tuple[float, float]:
        ended, sampled = "sum(sluice_request_decode_time_seconds_count)", "sum(sluice_sampled_tokens_total)"
        return monitor.value(ended), monitor.value(sampled)

    until(lambda: of_frontends() == sent, f"the sums over all targets to be {sent}")
    until(lambda: of_worker() == (sent["requests"], sent["generated"]), "the worker's")
    print(f"sent {sent}\nPrometheus: frontends {of_frontends()}, worker {of_worker()}", flush=True)


def _check_spread(server: Server) -> None:
    lines = re.findall(r"^(frontend \d) .*/v1/completions", server.log.read_text(), re.MULTILINE)
    shares = {name: lines.count(name) for name in sorted(set(lines))}
    assert len(shares) == 2, shares
    print(f"answered by {shares}", flush=True)


def _check_names(monitor: Prometheus) -> None:
    queried = {name for query in queries() for name in re.findall(r"\bsluice_[a-z0-9_]+", query)}
    absent = {name.removeprefix("sluice_") for name in queried - monitor.names()}
    assert absent <= INITIALLY_ABSENT, absent
    print(f"{len(queried) - len(absent)} of {len(queried)} queried metrics exist; not yet: {sorted(absent)}")


def _check_dashboard(monitor: Prometheus) -> None:
    """Checks that Prometheus accepts every query. Only queries of counters not incremented yet have no result."""
    variables = {"$model": ".*", "$frontend": ".*", "$worker": ".*", "$__rate_interval": "1m", "$__range": "5m"}
    empty, queried = [], [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for query in queried:
        for name, value in variables.items():
            query = query.replace(name, value)
        empty += [query] * (not monitor.series(query))
    assert all(any(name in query for name in INITIALLY_ABSENT) for query in empty), empty
    print(f"{len(queried) - len(empty)} of the dashboard's {len(queried)} queries have a result", flush=True)


def _pause_and_resume(server: Server, monitor: Prometheus) -> None:
    worker = server.stats()["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    start = time.monotonic()
    try:
        _until_firing(monitor, {"SluiceWorkerDown", "SluiceNoWorkerReady"})
        print(f"worker stopped: {sorted(monitor.firing())} after {time.monotonic() - start:.1f} s", flush=True)
    finally:
        os.kill(worker, signal.SIGCONT)
    start = time.monotonic()
    until(lambda: not monitor.firing(), "the alerts to end")
    print(f"worker continues: no alert after {time.monotonic() - start:.1f} s", flush=True)
    assert server.stats()["worker"]["pid"] == worker


def _kill(server: Server, monitor: Prometheus) -> None:
    stats: dict[str, Any] = server.stats()
    os.kill(stats["worker"]["pid"], signal.SIGKILL)
    start = time.monotonic()
    _until_firing(monitor, {"SluiceWorkerRestarted"})
    print(f"worker killed: SluiceWorkerRestarted after {time.monotonic() - start:.1f} s", flush=True)
    server.until(lambda s: s["worker"]["epoch"] == stats["worker"]["epoch"] + 1 and s["worker"]["last_step_age_s"] < 1)
    until(lambda: server.client.get("/ready").status_code == 200, "the worker")


def _until_firing(monitor: Prometheus, names: set[str]) -> None:
    until(lambda: names <= monitor.firing(), f"{names} to fire")

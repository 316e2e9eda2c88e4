"""A server with two frontends under Prometheus: sums are exact, and alerts fire when, and only when, they should."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from deploy.monitoring.dashboard import dashboard
from tests.deploy.monitoring.queries import queries
from tests.e2e.server import Server, free_port, serving
from tests.ops.programs import Prometheus, prometheus, until

# Counters with a label begin when there is something to count.
LATER = {"submits_rejected_total", "rejected_total", "aborts_total", "http_refused_total", "request_failed_total"}
LATER |= {"key_requests_total", "key_prompt_tokens_total", "key_generation_tokens_total"}


def monitored(room: Path) -> None:
    port = free_port()
    flags = ("--frontends", "2", "--worker-metrics-port", str(port), "--access-log", "text")
    with ExitStack() as stack:
        server = stack.enter_context(serving("demo", room / "serve.log", *flags))
        own = int(server.url.rpartition(":")[2])
        seen = stack.enter_context(prometheus(room / "prometheus", [own], [port]))
        until(lambda: seen.value("sum(up)") == 2, "both targets")
        print("up == 1 for", [metric["job"] for metric, value in seen.series("up") if value == 1], flush=True)
        sent = _send(server, 40)
        _check_sums(seen, sent)
        _check_spread(server)
        _check_names(seen)
        _check_dashboard(seen)
        time.sleep(4)  # longer than an alert waits here
        assert not seen.firing(), seen.firing()
        _stop_and_go_on(server, seen)
        _kill(server, seen)
        more = _send(server, 10)
        _check_sums(seen, {name: sent[name] + more[name] for name in sent})


def _send(server: Server, count: int) -> dict[str, int]:
    """Requests of known lengths, each on a connection of its own so that both frontends get some."""
    totals = dict.fromkeys(("requests", "prompt", "generated"), 0)
    for i in range(count):
        prompt, tokens = list(range(5, 8 + i)), 4 + i % 7
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": i % 2 == 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        for name, value in zip(totals, (1, len(prompt), tokens), strict=True):
            totals[name] += value
    return totals


def _check_sums(seen: Prometheus, sent: dict[str, int]) -> None:
    names = {"requests": "request_success", "prompt": "prompt_tokens", "generated": "generation_tokens"}

    def now() -> dict[str, float]:
        return {what: seen.value(f"sum(sluice_{name}_total)") for what, name in names.items()}

    def of_worker() -> tuple[float, float]:
        ended, sampled = "sum(sluice_request_decode_time_seconds_count)", "sum(sluice_sampled_tokens_total)"
        return seen.value(ended), seen.value(sampled)

    until(lambda: now() == sent, f"the sums over all targets to be {sent}")
    until(lambda: of_worker() == (sent["requests"], sent["generated"]), "the worker's")
    print(f"sent {sent}\nPrometheus has, of the frontends {now()}, of the worker {of_worker()}", flush=True)


def _check_spread(server: Server) -> None:
    lines = re.findall(r"^(frontend \d) .*/v1/completions", server.log.read_text(), re.MULTILINE)
    shares = {name: lines.count(name) for name in sorted(set(lines))}
    assert len(shares) == 2, shares
    print(f"answered by {shares}", flush=True)


def _check_names(seen: Prometheus) -> None:
    asked = {name for query in queries() for name in re.findall(r"\bsluice_[a-z0-9_]+", query)}
    absent = {name.removeprefix("sluice_") for name in asked - seen.names()}
    assert absent <= LATER, absent
    print(f"{len(asked) - len(absent)} of {len(asked)} metrics that are asked for are there; not yet: {sorted(absent)}")


def _check_dashboard(seen: Prometheus) -> None:
    """Prometheus takes every query of it; those without an answer are of counters nobody has added to yet."""
    variables = {"$frontend": ".*", "$worker": ".*", "$__rate_interval": "1m", "$__range": "5m"}
    silent, asked = [], [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for query in asked:
        for name, value in variables.items():
            query = query.replace(name, value)
        silent += [query] * (not seen.series(query))
    assert all(any(name in query for name in LATER) for query in silent), silent
    print(f"{len(asked) - len(silent)} of the dashboard's {len(asked)} queries have an answer", flush=True)


def _stop_and_go_on(server: Server, seen: Prometheus) -> None:
    worker = server.stats()["worker"]["pid"]
    os.kill(worker, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        _until_firing(seen, {"SluiceWorkerDown", "SluiceNoWorkerReady"})
        print(f"worker stopped: {sorted(seen.firing())} after {time.monotonic() - begun:.1f} s", flush=True)
    finally:
        os.kill(worker, signal.SIGCONT)
    begun = time.monotonic()
    until(lambda: not seen.firing(), "the alerts to end")
    print(f"worker goes on: no alert after {time.monotonic() - begun:.1f} s", flush=True)
    assert server.stats()["worker"]["pid"] == worker


def _kill(server: Server, seen: Prometheus) -> None:
    stats: dict[str, Any] = server.stats()
    os.kill(stats["worker"]["pid"], signal.SIGKILL)
    begun = time.monotonic()
    _until_firing(seen, {"SluiceWorkerRestarted"})
    print(f"worker killed: SluiceWorkerRestarted after {time.monotonic() - begun:.1f} s", flush=True)
    server.until(lambda s: s["worker"]["epoch"] == stats["worker"]["epoch"] + 1 and s["worker"]["last_step_age_s"] < 1)
    until(lambda: server.client.get("/ready").status_code == 200, "the worker")


def _until_firing(seen: Prometheus, names: set[str]) -> None:
    until(lambda: names <= seen.firing(), f"{names} to fire")

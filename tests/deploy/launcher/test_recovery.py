"""A real server whose worker hangs, breaks and is killed, and whose frontends are replaced: no stream is affected."""

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.cli.processes import reload as reload_now
from tests.deploy.launcher.faulty import HERE, POISON
from tests.e2e.server import Events, Server, free_port, serving
from tests.patience import PATIENCE_S

PROMPTS = [[20 + id, 30, 40] for id in range(4)]
LENGTH = 100


def counters(url: str) -> dict[str, float]:
    """Returns the values of all counters and histograms of a /metrics page."""
    lines = [line for line in httpx.get(url, timeout=PATIENCE_S).text.splitlines() if not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs if re.search(r"(_total|_count|_sum|_bucket)($|{)", name)}


class Trouble:
    """Streams that run during a fault of the worker."""

    def __init__(self, server: Server, folder: Path, metrics: str) -> None:
        self.server, self.folder, self.metrics = server, folder, metrics
        self.pool = ThreadPoolExecutor(8)
        self.whole = [self.server.events(prompt, LENGTH, ignore_eos=True).ids for prompt in PROMPTS]

    def start(self, prompt: list[int]) -> "Future[Events]":
        return self.pool.submit(self.server.events, prompt, LENGTH, ignore_eos=True)

    def inject(self, fault: Callable[[dict[str, Any]], None], *more: list[int], deaths: int = 1) -> list[Events]:
        """Injects the fault, and asserts that no stream has changed. Returns the streams of the prompts in `more`."""
        before, epoch = counters(self.metrics), self.server.stats()["worker"]["epoch"]
        with self.server.hold.at(LENGTH // 2):
            streams = [self.start(prompt) for prompt in PROMPTS]
            self.server.until(lambda s: s["running"] == len(PROMPTS))
            others = [self.start(prompt) for prompt in more]
            fault(self.server.stats()["worker"])
        assert [stream.result(PATIENCE_S).ids for stream in streams] == self.whole
        assert all(stream.result().error is None for stream in streams)
        ended = [other.result(PATIENCE_S) for other in others]
        assert self.server.until_idle()["worker"]["epoch"] == epoch + deaths
        self.check(before)
        return ended

    def check(self, before: dict[str, float]) -> None:
        after = counters(self.metrics)
        assert [name for name, value in before.items() if after.get(name, 0.0) < value] == [], "a counter fell"
        page = httpx.get(self.metrics, timeout=PATIENCE_S).text
        assert len(re.findall(r"^sluice_worker_epoch{", page, re.MULTILINE)) == 1

    def fault(self, name: str) -> Callable[[dict[str, Any]], None]:
        return lambda worker: (self.folder / name).write_text(str(worker["epoch"])) and None


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("faults")
    port = free_port()
    flags = ("--stall-timeout", "4", "--worker-metrics-port", str(port), "--canary-interval", "0.2")
    with serving("demo", folder / "log", *flags, entry=(HERE, str(folder))) as server:
        yield Trouble(server, folder, f"http://127.0.0.1:{port}/metrics")


def test_loading_progress_is_shown(trouble: Trouble) -> None:
    shown = [int(tenth) for tenth in re.findall(r"loading: (\d+) %", trouble.server.log.read_text())]
    assert len(set(shown)) > 2
    # values may decrease slightly, because one of the two frontends may be behind
    assert all(then >= now - 20 for now, then in pairwise(shown))


def test_hanging_worker_is_killed_and_its_streams_continue(trouble: Trouble) -> None:
    trouble.inject(trouble.fault("hang"))
    assert "worker hangs: no progress for" in trouble.server.log.read_text()


def test_stopped_worker_is_killed_and_its_streams_continue(trouble: Trouble) -> None:
    trouble.inject(lambda worker: os.kill(worker["pid"], signal.SIGSTOP))
    assert "worker hangs: no sign of life for 4 s (it is stopped); killing it" in trouble.server.log.read_text()


def test_lost_device_ends_the_worker_and_no_stream(trouble: Trouble) -> None:
    trouble.inject(trouble.fault("broken"))
    assert "cannot compute: RuntimeError: device lost" in trouble.server.log.read_text()


def test_idle_worker_detects_a_lost_device(trouble: Trouble) -> None:
    worker = trouble.server.stats()["worker"]
    trouble.fault("broken")(worker)
    trouble.server.until(lambda s: s["worker"]["epoch"] == worker["epoch"] + 1 and s["worker"]["state"] == "ready")


def test_request_that_crashes_workers_is_quarantined_alone(trouble: Trouble) -> None:
    [poison] = trouble.inject(lambda worker: None, POISON, deaths=2)
    assert poison.error is not None and "quarantined: in flight in 2 worker crashes" in poison.error
    assert not poison.ids


def test_stopped_frontend_is_restarted(trouble: Trouble) -> None:
    pid = trouble.server.stats()["frontends"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    trouble.server.until(lambda s: [peer["pid"] for peer in s["frontends"] if peer["pid"] != pid])


class Load:
    """Sends requests without pause until the `with` ends.

    One thread keeps its connection, another opens one for each request.
    """

    def __init__(self, url: str) -> None:
        self.url, self.served, self.failed, self.over = url, 0, list[str](), threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(keep,)) for keep in (True, False)]

    def run(self, keep: bool) -> None:
        with httpx.Client(timeout=PATIENCE_S) as kept:
            while not self.over.wait(0.03):
                if keep:
                    self.ask(kept)
                else:
                    with httpx.Client(timeout=PATIENCE_S) as fresh:
                        self.ask(fresh)

    def ask(self, client: httpx.Client) -> None:
        try:
            body = {"model": "m", "prompt": [20, 30], "max_tokens": 3}
            answer = client.post(self.url + "/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            self.served += 1
        except Exception as error:
            self.failed.append(repr(error))

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_reload_refuses_no_request(tmp_path: Path, socket_folder: Path) -> None:
    run = str(socket_folder / "run")
    with serving("demo", tmp_path / "log", "--frontends", "2", "--run-dir", run, held=True) as server:
        old = {peer["pid"] for peer in server.stats()["frontends"]}
        whole = server.events([20, 30, 40], 200, ignore_eos=True).ids
        with Load(server.url) as load, ThreadPoolExecutor(1) as pool, server.hold.at(1, 0.03):
            stream = pool.submit(server.events, [20, 30, 40], 200, ignore_eos=True)
            server.until(lambda s: s["running"] > 0 and load.served > 0)
            for replaced in (2, 4):
                reload_now(["--run-dir", run])
                server.until(lambda s: server.log.read_text().count("was replaced") == replaced)  # noqa: B023
            server.until(lambda s: load.served > 20)
            server.hold.release()
            assert stream.result(PATIENCE_S).ids == whole
        assert load.failed == [] and load.served > 20
        assert not old & {peer["pid"] for peer in server.stats()["frontends"]}

"""A pytest plugin for llama.cpp's tests: Sluice replaces llama-server, and small models replace the models of its hub.

The tests start a server with llama-server's flags, which command_line.py translates. Consecutive tests with the same
flags share a server, unless they count what the server did before. Assertions about the text of a test's own model, or
about the number of tokens of a prompt, cannot hold for another model. So their patterns match every text, and their
numbers equal every number.
"""

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import requests

from tests.llama_cpp.command_line import NotOffered, read, serve_arguments
from tests.llama_cpp.stand_ins import IMAGES, StandIns, image_server, made
from tests.llama_cpp.unmet import NOT_OFFERED, OWN_MODEL

ROOT = Path(__file__).parents[2]
COUNTS = {"n_prompt", "n_tokens", "n_token_output"}  # parameters of tests that count their own model's tokens
START_S = 60.0
FRESH = ("cache", "progress", "metrics", "router")  # words in the names of tests that count what a server did before
# --reasoning → enable_thinking, which llama-server passes to every template
THINKS = {"on": True, "auto": True, "off": False}


class Servers:
    """Replaces the module `subprocess` in the tests' utils. Its only process is a server of Sluice."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, folder: Path) -> None:
        self.stand_ins = made(folder)
        self.log = folder / "server.log"
        self._arguments: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def Popen(self, command: list[str], **_: Any) -> "Shared":
        try:
            arguments = serve_arguments(read(command[1:]), self.stand_ins, Path.cwd())
        except NotOffered as missing:
            pytest.skip(f"not offered: {missing}")
        running = self._process is not None and self._process.poll() is None
        counts_cached = any(word in os.environ["PYTEST_CURRENT_TEST"] for word in FRESH)
        if self._process is None or not running or counts_cached or arguments != self._arguments:
            self.stop()
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "deploy.cli.main", "serve", *arguments], cwd=ROOT, stdout=log, stderr=log
                )
            self._arguments = arguments
            self._await_ready()
        return Shared(self._process)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _await_ready(self) -> None:
        """Waits for /ready, the counterpart of llama-server's /health: Sluice's /health does not wait for the model."""
        deadline = time.monotonic() + START_S
        url = f"http://127.0.0.1:{self._arguments[self._arguments.index('--port') + 1]}/ready"
        while self._process and self._process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if httpx.get(url).status_code == 200:
                    return
            time.sleep(0.05)


class Shared:
    """A shared server in the form of a process. When a test ends the process, the server runs on for the next test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.poll = process.poll

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None: ...

    def wait(self, timeout: float | None = None) -> None: ...


_results: dict[str, dict[str, str]] = {}
_servers: list[Servers] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Runs before the tests' conftest, which imports a package that downloads models."""
    unreachable = types.ModuleType("wget")
    unreachable.download = lambda url, out: pytest.skip(f"not offered: {url}")  # type: ignore[attr-defined]
    sys.modules["wget"] = unreachable


def pytest_collection(session: pytest.Session) -> None:
    """Runs before the tests' modules are imported, because they import all names of utils."""
    import utils  # type: ignore[import-not-found]

    _servers.append(Servers(Path(os.environ["SLUICE_TEST_STAND_INS"])))
    images = image_server()
    plain = requests.get
    requests.get = lambda url, **more: plain(url.replace(IMAGES, images), **more)
    utils.TMP_DIR = os.environ["SLUICE_TEST_STAND_INS"]
    utils.download_file = partial(downloaded, _servers[0].stand_ins)
    utils.subprocess = _servers[0]
    utils.match_regex = lambda regex, text: isinstance(text, str)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, adapted(getattr(utils.ServerProcess, name), images))


def downloaded(stand_ins: StandIns, url: str, path: str | None = None) -> str:
    """Replaces the tests' function that downloads an adapter or a draft model, and returns the path of a stand-in."""
    if url.endswith("moe_shakespeare15M.gguf"):
        return str(stand_ins.adapter)
    if url.endswith("stories15M-q4_0.gguf"):
        return str(stand_ins.models["stories15M_MOE-F16.gguf"])
    pytest.skip(f"not offered: {url}")


def adapted(ask: Callable[..., Any], images: str) -> Callable[..., Any]:
    """Returns a function that sends a request. It adds the seed, the temperature and the reasoning of llama-server's
    flags, which Sluice lacks, and puts the "b" that the tests expect before the name of the build. images: the URL
    that replaces the hub's
    """

    def renamed(body: Any) -> Any:
        if isinstance(body, dict) and "system_fingerprint" in body:
            body["system_fingerprint"] = f"b-{body['system_fingerprint']}"
        return body

    @wraps(ask)
    def asking(server: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any) -> Any:
        if isinstance(data, dict) and path.endswith(("completion", "completions", "infill")):
            data = {"seed": server.seed, "temperature": server.temperature, **data}
        if isinstance(data, dict) and server.reasoning in THINKS:
            data = {**data, "chat_template_kwargs": {"enable_thinking": THINKS[server.reasoning]}}
        data = json.loads(json.dumps(data).replace(IMAGES, images))
        answer = ask(server, method, path, data, *more, **named)
        if isinstance(answer, Iterator):
            return map(renamed, answer)
        renamed(answer.body)
        # tests use one spelling of header names
        answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
        return answer

    return asking


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = f"{Path(item.nodeid.partition('::')[0]).name}::{item.name}"
        for kind, table in (("not offered", NOT_OFFERED), ("own model", OWN_MODEL)):
            for known, reason in table.items():
                if name == known or name.startswith((f"{known}[", f"{known}::")):
                    item.add_marker(pytest.mark.skip(reason=f"{kind}: {reason}"))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            item.callspec.params.update({name: ANY for name in COUNTS & item.callspec.params.keys()})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or not report.passed:
        why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
        kind, _, reason = why.removeprefix("Skipped: ").partition(": ")
        if report.skipped and kind in ("not offered", "own model"):
            _results[item.nodeid] = {"outcome": kind, "reason": reason}
        else:
            _results[item.nodeid] = {"outcome": report.outcome, "reason": why}
        Path(os.environ["SLUICE_TEST_RESULTS"]).write_text(json.dumps(_results, indent=1))
    return report


def pytest_sessionfinish() -> None:
    for servers in _servers:
        servers.stop()

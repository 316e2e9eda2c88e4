"""A pytest plugin for llama.cpp's tests: Sluice in place of llama-server, small models in place of those of its hub.

The tests start a server with llama-server's flags; command_line.py makes those of `sluice serve` of them. Tests that
follow each other with the same flags share a server, unless they count what it did before. What a test asserts
about the text of its own model, or the number of tokens of a prompt, holds for no other model: such a pattern matches
every text, and such a number equals every number.
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
from tests.llama_cpp.stand_ins import PICTURES, StandIns, made, picture_server
from tests.llama_cpp.unmet import NOT_OFFERED, OWN_MODEL

ROOT = Path(__file__).parents[2]
COUNTS = {"n_prompt", "n_tokens", "n_token_output"}  # parameters of tests that count their own model's tokens
START_S = 60.0
FRESH = ("cache", "progress", "metrics", "router")  # words in the names of tests that count what a server did before
THINKS = {"on": True, "auto": True, "off": False}  # --reasoning -> what llama-server always tells a template


class Servers:
    """Takes the place of the module `subprocess` in the tests' utils: its one process is a server of Sluice."""

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
        """llama-server's /health waits for the model; Sluice's says that the process runs, and /ready the other."""
        deadline = time.monotonic() + START_S
        url = f"http://127.0.0.1:{self._arguments[self._arguments.index('--port') + 1]}/ready"
        while self._process and self._process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if httpx.get(url).status_code == 200:
                    return
            time.sleep(0.05)


class Shared:
    """A server as a test sees its process: when the test ends it, it goes on for the next one."""

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
    """Before the tests' conftest, which imports a package that downloads models."""
    unreachable = types.ModuleType("wget")
    unreachable.download = lambda url, out: pytest.skip(f"not offered: {url}")  # type: ignore[attr-defined]
    sys.modules["wget"] = unreachable


def pytest_collection(session: pytest.Session) -> None:
    """Before the tests' modules are imported, which take all names of utils."""
    import utils  # type: ignore[import-not-found]

    _servers.append(Servers(Path(os.environ["SLUICE_TEST_STAND_INS"])))
    pictures = picture_server()
    plain = requests.get
    requests.get = lambda url, **more: plain(url.replace(PICTURES, pictures), **more)
    utils.TMP_DIR = os.environ["SLUICE_TEST_STAND_INS"]
    utils.download_file = partial(downloaded, _servers[0].stand_ins)
    utils.subprocess = _servers[0]
    utils.match_regex = lambda regex, text: isinstance(text, str)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, adapted(getattr(utils.ServerProcess, name), pictures))


def downloaded(stand_ins: StandIns, url: str, path: str | None = None) -> str:
    """Takes the place of the tests' function that fetches an adapter or a draft model, and returns where it is."""
    if url.endswith("moe_shakespeare15M.gguf"):
        return str(stand_ins.adapter)
    if url.endswith("stories15M-q4_0.gguf"):
        return str(stand_ins.models["stories15M_MOE-F16.gguf"])
    pytest.skip(f"not offered: {url}")


def adapted(ask: Callable[..., Any], pictures: str) -> Callable[..., Any]:
    """Returns a function that sends a request with the seed, the temperature and the reasoning of the server's flags,
    which Sluice does not have, and puts a b before the name of the build, which the tests expect there. pictures: the
    URL that takes the place of the hub's
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
        data = json.loads(json.dumps(data).replace(PICTURES, pictures))
        answer = ask(server, method, path, data, *more, **named)
        if isinstance(answer, Iterator):
            return map(renamed, answer)
        renamed(answer.body)
        answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)  # in tests, names are of one spelling
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

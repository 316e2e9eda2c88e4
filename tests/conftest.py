"""Fixtures and settings that several folders of tests share."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from weakref import WeakSet

import hypothesis
import pytest
import torch

from tests import sampling
from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.server import Server

ON_GPU = ("mark.gpu", "kernels.harness.cases")  # a file with one of these words may hold tests for a GPU

# On a busy machine, Hypothesis draws slowly, which is no fault of a test.
hypothesis.settings.register_profile("sluice", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("sluice")
torch.set_num_threads(1)  # models are tiny, so a second thread would cost more than it saves


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Takes back what an engine of an earlier test has set. With two threads, dummy sequences, which share a
    scratch slot, would race in the C kernels of recurrent layers, which use the slot as their working memory.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logs_of_this_test(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Leaves out of `caplog` what threads say that earlier tests left behind, because tests count what is logged."""
    left_behind = WeakSet(thread for thread in threading.enumerate() if thread is not threading.current_thread())

    def of_this_test(record: logging.LogRecord) -> bool:
        return threading.current_thread() not in left_behind

    caplog.handler.addFilter(of_this_test)
    yield
    caplog.handler.removeFilter(of_this_test)


@pytest.fixture(scope="session", autouse=True)
def _clients_are_patient_and_read_certificates_once() -> Iterator[None]:
    """Clients that name no time limit wait longer than httpx's 5 s, which pass on a busy machine. They share one SSL
    context: reading the system's certificates would take each client 28 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):  # tests for a GPU run without httpx
            from httpx._config import DEFAULT_TIMEOUT_CONFIG
            from httpx._transports import default

            for kind in ("connect", "read", "write", "pool"):
                patch.setattr(DEFAULT_TIMEOUT_CONFIG, kind, PATIENCE_S)
            patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replaces pytest's fixture, which names the folder after the test: the path of a socket has at most 107
    bytes.
    """
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, wherever pytest keeps temporary files."""
    with TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints("qwen3")` returns the folder of a tiny checkpoint; tests/checkpoints.py lists the kinds."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """A server of the demo model with two frontends, shared by tests that need no other flags: a start takes seconds.

    Tests may hold, kill and stop its processes, and must leave it idle and ready.
    """
    from tests.e2e.server import serving

    with serving("demo", tmp_path_factory.mktemp("demo") / "log", "--frontends", "2", held=True) as server:
        server.until(lambda stats: len(stats["frontends"]) == 2)
        yield server


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds `--sample` and `--turns`.

    Where pytest-asyncio is not installed, also adds its settings: tests for a GPU do not need the package.
    """
    parser.addoption(
        "--sample", metavar="DAY", help="run a sample of the slow tests, drawn by DAY: see tests/sampling.py"
    )
    parser.addoption(
        "--turns", metavar="DAY", type=date.fromisoformat, help="leave out long tests that take turns on other days"
    )
    if not pluginmanager.hasplugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, ignores files without tests for a GPU, so that their imports need not be installed.

    With `--sample`, ignores the files that are not drawn.
    """
    if config.option.sample and collection_path in _unread(config.option.sample):
        return True
    if config.option.markexpr != "gpu" or not collection_path.name.startswith("test_"):
        return None
    return None if any(word in collection_path.read_text() for word in ON_GPU) else True


@cache
def _unread(day: str) -> set[Path]:
    return sampling.unread(Path(__file__).parents[1], day, sampling.FILES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked `browser`, unless `-m` names the mark.

    With `--turns`, also deselects the long tests of other days; with `--sample`, the tests that are not drawn, and
    gives Hypothesis fewer examples. Files with tests marked `slow` come first, so that no process computes long alone
    at the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if "browser" not in config.option.markexpr:
        _deselect(config, items, {item.nodeid for item in items if item.get_closest_marker("browser")})
    if turn := config.option.turns:
        _deselect(config, items, sampling.of_other_days([item.nodeid for item in items], turn, sampling.TURNS))
    if day := config.option.sample:
        names = [item.nodeid for item in items]
        _deselect(config, items, sampling.left_out(names, day, sampling.CASES, sampling.TESTS))
        for function in {item.obj for item in items if hypothesis.is_hypothesis_test(getattr(item, "obj", None))}:
            limit_examples(getattr(function, "__func__", function))


def limit_examples(function: Callable[..., object]) -> None:
    """Limits the examples of a test. Hypothesis has no public way to change the settings of a decorated test."""
    name = "_hypothesis_internal_use_settings"
    given = getattr(function, name, None)
    if given is not None:  # a state machine has its settings elsewhere
        setattr(function, name, hypothesis.settings(given, max_examples=min(given.max_examples, sampling.EXAMPLES)))


def pytest_report_header(config: pytest.Config) -> str | None:
    if turn := config.option.turns:
        return f"long tests that take turns: of {turn} (make test FULL=all runs all of them)"
    day = config.option.sample
    return day and f"sample: of {day} (make test DAY={day} repeats it, make test FULL=all runs everything)"


def _deselect(config: pytest.Config, items: list[pytest.Item], names: set[str]) -> None:
    deselected = [item for item in items if item.nodeid in names]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item.nodeid not in names]

"""Fixtures of the browser tests. They import Playwright only when a browser test runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.server import Server, serving
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import QWEN3

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.web.playground import Playground

    OpenPlayground = Callable[..., AbstractContextManager[Playground]]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import expect

    from tests.web.browser import chromium
    from tests.web.playground import PATIENCE_MS

    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server with the demo model."""
    with serving("demo", tmp_path_factory.mktemp("playground") / "log") as server:
        yield server


@pytest.fixture
def ui(browser: "Browser", demo: Server) -> "Iterator[Playground]":
    """The playground of the demo server, open and ready."""
    from tests.web.playground import playground

    with playground(browser, demo.url) as page:
        page.open()
        yield page


@pytest.fixture
def open_playground(browser: "Browser") -> "OpenPlayground":
    """`with open_playground(url, **context) as page` opens the playground of another server."""
    from tests.web.playground import playground

    return lambda url, **context: playground(browser, url, **context)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture
def model(qwen_folder: Any) -> Model:
    """A fake model with scripted outputs, and Qwen's format of reasoning and tool calls."""
    return Model(tokenizer_with(qwen_folder, QWEN3))

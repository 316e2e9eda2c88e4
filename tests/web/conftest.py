"""Fixtures of the browser tests. Playwright is imported only when one runs."""

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

    Opens = Callable[..., AbstractContextManager[Playground]]


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
def here(browser: "Browser", demo: Server) -> "Iterator[Playground]":
    """The demo's playground, open and ready."""
    from tests.web.playground import playground

    with playground(browser, demo.url) as page:
        page.open()
        yield page


@pytest.fixture
def opened(browser: "Browser") -> "Opens":
    """`with opened(url, **context) as page` is the playground of another server."""
    from tests.web.playground import playground

    return lambda url, **context: playground(browser, url, **context)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture
def scripted(qwen_folder: Any) -> Model:
    """A model that says what its test tells it to, with Qwen's way to think and to call."""
    return Model(tokenizer_with(qwen_folder, QWEN3))

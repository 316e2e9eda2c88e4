"""The system's Chromium, and a page of it that notices whatever should not happen. Knows nothing of the playground."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ARGUMENTS = (ONLY_HERE, "--disable-background-networking", "--disable-component-update", "--no-first-run")
REFUSED = "Failed to load resource"  # what the console says of every answer from 400 on


def program() -> str:
    """$BROWSER_PROGRAM, or what is installed. Fails the test when there is none."""
    named = [os.environ["BROWSER_PROGRAM"]] if "BROWSER_PROGRAM" in os.environ else []
    found = next(filter(None, map(shutil.which, [*named, *PROGRAMS])), None)
    if found is None or (named and shutil.which(named[0]) is None):
        looked = ", ".join(named or PROGRAMS)
        pytest.fail(f"no browser: {looked} not found. Install Chromium, or name one: BROWSER_PROGRAM=/path/to/chrome")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless one that resolves no names: what is not on 127.0.0.1 cannot be reached."""
    executable = program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Watch:
    """Collects what a page does wrong: errors in its console (breaches of its policy are among them), exceptions,
    requests to others. `expected` are statuses of refusals that a test provokes, 0 for a connection that breaks."""

    def __init__(self, page: Page, origin: str) -> None:
        self._origin = origin
        self.expected: set[int] = set()
        self.wrong: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        page.on("request", self._requested)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning") or self._is_expected(message.text):
            return
        self.wrong.append(f"{message.type}: {message.text}")

    def _is_expected(self, text: str) -> bool:
        if not text.startswith(REFUSED):
            return False
        return any(f"status of {status} " in text if status else "net::ERR_" in text for status in self.expected)

    def _requested(self, request: Request) -> None:
        if not request.url.startswith((self._origin + "/", "data:", "about:")):
            self.wrong.append(f"asked {request.url}")


@contextmanager
def watched(browser: Browser, origin: str, **context: Any) -> Iterator[tuple[Page, Watch]]:
    """A page with a storage of its own; nothing may have gone wrong when the `with` ends."""
    own = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    try:
        page = own.new_page()
        watch = Watch(page, origin)
        yield page, watch
    finally:
        own.close()
    if watch.wrong:
        raise AssertionError("the page did what it must not:\n" + "\n".join(watch.wrong))

"""Starts the system's Chromium and opens pages that record errors. The module is independent of the playground."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_RESOLVER = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ARGUMENTS = (NO_RESOLVER, "--disable-background-networking", "--disable-component-update", "--no-first-run")
REFUSED = "Failed to load resource"  # Chromium's console message for every status from 400 on


def program() -> str:
    """Returns $BROWSER_PROGRAM or the first installed browser; fails the test if there is none."""
    named = [os.environ["BROWSER_PROGRAM"]] if "BROWSER_PROGRAM" in os.environ else []
    path = next(filter(None, map(shutil.which, [*named, *PROGRAMS])), None)
    if path is None or (named and shutil.which(named[0]) is None):
        tried = ", ".join(named or PROGRAMS)
        pytest.fail(f"no browser: {tried} not found. Install Chromium, or name one: BROWSER_PROGRAM=/path/to/chrome")
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts a headless Chromium that resolves no names, so that it reaches only 127.0.0.1."""
    executable = program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Watch:
    """Collects errors of a page: console errors (including violations of its CSP), exceptions, requests to other hosts.

    expected_statuses: statuses of refusals that a test provokes; 0 is a broken connection.
    """

    def __init__(self, page: Page, origin: str) -> None:
        self._origin = origin
        self.expected_statuses: set[int] = set()
        self.errors: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning") or self._is_expected(message.text):
            return
        self.errors.append(f"{message.type}: {message.text}")

    def _is_expected(self, text: str) -> bool:
        if not text.startswith(REFUSED):
            return False
        return any(
            f"status of {status} " in text if status else "net::ERR_" in text for status in self.expected_statuses
        )

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self._origin + "/", "data:", "about:")):
            self.errors.append(f"requested {request.url}")


@contextmanager
def watched(browser: Browser, origin: str, **context: Any) -> Iterator[tuple[Page, Watch]]:
    """Opens a page with its own storage; raises if the page has recorded errors when the block ends."""
    browser_context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    try:
        page = browser_context.new_page()
        watch = Watch(page, origin)
        yield page, watch
    finally:
        browser_context.close()
    if watch.errors:
        raise AssertionError("errors of the page:\n" + "\n".join(watch.errors))

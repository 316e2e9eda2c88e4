"""The page object of the playground: the elements that users click, fill in and read."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.web.browser import Watch, watched

PATIENCE_MS = 60_000
GENERATION = re.compile(r"/v1/(chat/)?completions$")

# Runs in the page and records the length of the last answer after each change.
NOTE_LENGTHS = """() => {
  window.lengths = [];
  const note = () => lengths.push([...document.querySelectorAll(".answer")].at(-1)?.textContent.length ?? 0);
  new MutationObserver(note).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


def flat(text: str) -> str:
    """Returns the text with single spaces: an answer in Markdown shows line breaks as paragraphs."""
    return " ".join(text.split())


class Playground:
    def __init__(self, page: Page, watch: Watch, url: str) -> None:
        self.page, self.watch, self.url = page, watch, url
        self.settings = page.locator("#settings")

    def open(self, query: str = "") -> None:
        self.page.goto(f"{self.url}/{query}")
        expect(self.page.locator("#state")).to_have_text("ready")

    @property
    def panel(self) -> Locator:
        return self.page.locator(".panel:not([hidden])")

    @property
    def turn(self) -> Locator:
        return self.panel.locator(".turn").last

    @property
    def answer(self) -> str:
        """The last answer as it is shown; see flat()."""
        return flat(self.turn.locator(".answer").inner_text())

    @property
    def kept_text(self) -> str:
        """The text of the only answer of a conversation, as the page stores it."""
        turns = "import('/web/store.js').then((store) => store.turnsOf(location.hash.slice(1)))"
        (turn,) = self.page.evaluate(turns)
        return str(turn["text"])

    @property
    def error(self) -> str:
        return self.turn.locator(".error").text_content() or ""

    @property
    def timing(self) -> str:
        return self.turn.locator(".timing").text_content() or ""

    def set_field(self, name: str, value: str) -> None:
        if self.settings.get_attribute("open") is None:
            self.settings.locator("summary").click()
        self.settings.locator(f"[name={name}]").fill(value)

    def set_extra(self, name: str, value: str) -> None:
        """Fills in the system prompt, the tools or the schema."""
        if self.panel.locator(".extras").get_attribute("open") is None:
            self.panel.locator(".extras > summary").click()
        self.panel.locator(f"[name={name}]").fill(value)

    def send(self, text: str, *, until: str = "done", key: str = "Enter") -> None:
        turns = self.panel.locator(".turn").count()
        self.panel.locator(".composer textarea").fill(text)
        self.panel.locator(".composer textarea").press(key)
        expect(self.panel.locator(".turn")).to_have_count(turns + 1)
        self.wait_for_state(until)

    def wait_for_state(self, state: str) -> None:
        expect(self.turn).to_have_attribute("data-state", state)

    def button(self, name: str) -> Locator:
        return self.panel.get_by_role("button", name=name, exact=True)

    def of_turn(self, name: str) -> Locator:
        """A button of the last turn."""
        return self.turn.get_by_role("button", name=name, exact=True)

    def add_to_requests(self, **fields: Any) -> None:
        """Adds fields for which the page has no input to the page's further requests."""

        def add_fields(route: Route) -> None:
            route.continue_(post_data=json.dumps(json.loads(route.request.post_data or "{}") | fields))

        self.page.route(GENERATION, add_fields)


@contextmanager
def playground(browser: Browser, url: str, **context: Any) -> Iterator[Playground]:
    """Opens the playground in a new browser context; raises at the end if the page had errors (see Watch)."""
    with watched(browser, url, **context) as (page, watch):
        page.set_default_timeout(PATIENCE_MS)
        yield Playground(page, watch, url)

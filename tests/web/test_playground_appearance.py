"""Appearance and accessibility of the playground: themes, contrasts (WCAG 2.2, AA), names, focus, motion, widths."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.server import Server
from tests.web.playground import Playground, playground

pytestmark = pytest.mark.browser

SIZES = {"desktop": (1280, 800), "tablet": (1024, 768), "phone": (390, 844), "narrow": (360, 640)}
THEMES: list[Any] = ["light", "dark"]
MIN_CONTRAST = 4.5  # least contrast of text: https://www.w3.org/TR/WCAG22/#contrast-minimum

# Runs in the page: returns every visible and enabled text as [contrast to its background, the text].
CONTRASTS = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const over = (color, background) => {
    pen.fillStyle = `rgb(${background})`; pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const white = [255, 255, 255];
  const color = (node) => getComputedStyle(node).backgroundColor;
  const background = (node) => node ? over(color(node), background(node.parentElement)) : white;
  const contrast = (node, pseudo) => {
    const below = background(node), style = getComputedStyle(node, pseudo);
    const [a, b] = [light(over(style.color, below)), light(below)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const hasText = (node) => [...node.childNodes].some((child) => child instanceof Text && child.data.trim());
  const shown = [...document.querySelectorAll("body *:not(:disabled)")].filter((node) => node.checkVisibility());
  const texts = shown.filter(hasText);
  const hints = shown.filter((node) => node.placeholder && !node.value);
  return [...texts.map((node) => [contrast(node), node.outerHTML.slice(0, 90)]),
          ...hints.map((node) => [contrast(node, "::placeholder"), node.placeholder])];
}"""

# Runs in the page: returns the elements that scroll horizontally.
TOO_WIDE = """() => [...document.querySelectorAll("html, main, .log, #talk, .fields, #live, #settings")]
  .filter((box) => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX !== "visible")
  .map((box) => box.id || box.className || box.localName)"""

# Runs in the page: returns the focused element as [accessible name, whether the focus is visible].
FOCUSED = """() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const name = node.ariaLabel ?? node.labels?.[0]?.textContent ?? (node.textContent || node.placeholder);
  return [name.trim(), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""

# Runs in the page: opens every fold and adds a call, a thought and an error, so that the page is as full as possible.
UNFOLD = """() => {
  // a hidden fold would ask the server for what it does not keep
  for (const fold of document.querySelectorAll("details:not([hidden])")) fold.open = true;
  document.getElementById("access").hidden = false;
  const turn = document.querySelector(".turn");
  turn.querySelector(".thought").hidden = false;
  turn.querySelector(".thought summary").textContent = "Thought for 3 s";
  turn.querySelector(".thoughts").textContent = "x".repeat(300);
  const call = document.getElementById("call").content.cloneNode(true);
  call.querySelector(".arguments").textContent = "x".repeat(300);
  call.querySelector(".result").hidden = false;
  turn.querySelector(".calls").append(call);
  turn.querySelector(".calls").hidden = false;
  turn.querySelector(".error").textContent = "y".repeat(300);
  turn.querySelector(".error").hidden = false;
  for (const box of document.querySelectorAll(".log, #events")) box.append("z".repeat(300));
}"""


def open_with_answer(ui: Playground, tab: str = "chat") -> None:
    ui.open(f"?tab={tab}&probabilities=1&send=1&prompt=Tell+me+a+story+about+a+fox")
    ui.wait_for_state("done")


@pytest.mark.parametrize("size", SIZES)
def test_page_at_any_width_does_not_scroll_sideways(browser: Browser, demo: Server, size: str) -> None:
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    with playground(browser, demo.url, viewport=viewport, has_touch=width < 500) as ui:
        for tab in ("chat", "completion"):
            open_with_answer(ui, tab)
            for _ in ("as it opens", "with everything unfolded"):
                assert ui.page.evaluate(TOO_WIDE) == []
                assert ui.page.evaluate("document.documentElement.scrollWidth") <= width
                ui.page.evaluate(UNFOLD)


@pytest.mark.parametrize("theme", THEMES)
def test_text_in_any_theme_has_sufficient_contrast(browser: Browser, demo: Server, theme: Any) -> None:
    with playground(browser, demo.url, color_scheme=theme) as ui:
        for tab in ("chat", "completion"):
            open_with_answer(ui, tab)
            ui.page.evaluate(UNFOLD)
            contrasts = ui.page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            assert [(round(ratio, 2), text) for ratio, text in contrasts if ratio < MIN_CONTRAST] == []


def test_theme_choice_is_applied_and_remembered(browser: Browser, demo: Server) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    with playground(browser, demo.url, color_scheme="light") as ui:
        ui.open()
        light = ui.page.evaluate(background)
        ui.page.emulate_media(color_scheme="dark")
        dark = ui.page.evaluate(background)
        assert light != dark
        button = ui.page.get_by_role("button", name="Theme")
        button.click()
        expect(button).to_have_text("Theme: light")
        assert ui.page.evaluate(background) == light
        ui.open()
        assert ui.page.evaluate(background) == light
        button.click()
        ui.page.emulate_media(color_scheme="light")
        assert ui.page.evaluate(background) == dark


def test_tab_key_reaches_every_control_with_visible_focus(browser: Browser, demo: Server) -> None:
    with playground(browser, demo.url) as ui:
        open_with_answer(ui)
        ui.page.get_by_role("button", name="API key").press("Enter")
        ui.panel.locator(".extras > summary").press("Enter")
        focus_visible: dict[str, bool] = {}
        ends = 0  # how often the focus has left the last control
        while ends < 2 and len(focus_visible) < 99:
            ui.page.keyboard.press("Tab")
            if ui.page.evaluate("document.activeElement === document.body"):
                ends += 1
                continue
            name, visible = ui.page.evaluate(FOCUSED)
            focus_visible[name] = visible
        assert "" not in focus_visible
        assert [name for name, visible in focus_visible.items() if not visible] == []
        controls = {
            "API key",
            "Theme: auto",
            "Settings",
            "temperature",
            "seed",
            "stop",
            "Chat",
            "Answers: chat",
            "Live",
        }
        controls |= {
            "System prompt",
            "Tools, as a JSON array",
            "JSON schema of the answer",
            "Regenerate",
            "Copy as curl",
        }
        names = {name.split("\n")[0].strip() for name in focus_visible}
        assert controls <= names


def test_events_are_a_list_within_a_log_and_the_key_has_a_landmark(browser: Browser, demo: Server) -> None:
    with playground(browser, demo.url) as ui:
        ui.open()
        log = ui.page.get_by_role("log", name="What happened to the server")
        expect(log.get_by_role("list").get_by_role("listitem")).to_have_text([re.compile("ready$")])
        ui.page.get_by_role("button", name="API key").click()
        expect(ui.page.get_by_role("form", name="Access to this server")).to_be_visible()


def test_reduced_motion_stops_the_blinking(browser: Browser, demo: Server) -> None:
    blinking = "getComputedStyle(document.querySelector('.answer > p:last-child'), '::after').animationName"
    for motion, name in (("no-preference", "blink"), ("reduce", "none")):
        with playground(browser, demo.url, reduced_motion=motion) as ui:
            ui.add_to_requests(ignore_eos=True, max_tokens=1900)
            ui.open()
            ui.send("Tell me a story", until="running")
            expect(ui.turn.locator(".answer > p").last).not_to_be_empty()
            assert ui.page.evaluate(blinking) == name
            ui.button("Stop").click()
            ui.wait_for_state("stopped")

"""The playground for eyes, keys and small screens: themes, contrasts (WCAG 2.2, AA), names, focus, motion, widths."""

from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.server import Server
from tests.web.playground import Playground, playground

pytestmark = pytest.mark.browser

SIZES = {"desk": (1280, 800), "tablet": (1024, 768), "phone": (390, 844), "narrow": (360, 640)}
THEMES: list[Any] = ["light", "dark"]
LEAST = 4.5  # contrast of text: https://www.w3.org/TR/WCAG22/#contrast-minimum

# In the page: every text that is shown and enabled as [contrast to what lies under it, the text].
CONTRASTS = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const over = (color, ground) => {
    pen.fillStyle = `rgb(${ground})`; pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const white = [255, 255, 255];
  const ground = (node) => node ? over(getComputedStyle(node).backgroundColor, ground(node.parentElement)) : white;
  const contrast = (node, pseudo) => {
    const below = ground(node), style = getComputedStyle(node, pseudo);
    const [a, b] = [light(over(style.color, below)), light(below)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const says = (node) => [...node.childNodes].some((child) => child instanceof Text && child.data.trim());
  const shown = [...document.querySelectorAll("body *:not(:disabled)")].filter((node) => node.checkVisibility());
  const speaking = shown.filter(says);
  const hinting = shown.filter((node) => node.placeholder && !node.value);
  return [...speaking.map((node) => [contrast(node), node.outerHTML.slice(0, 90)]),
          ...hinting.map((node) => [contrast(node, "::placeholder"), node.placeholder])];
}"""

# In the page: what has to scroll sideways.
TOO_WIDE = """() => [...document.querySelectorAll("html, main, .log, #talk, .fields, #live, #settings")]
  .filter((box) => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX !== "visible")
  .map((box) => box.id || box.className || box.localName)"""

# In the page: what has the focus, as [its accessible name, whether one sees that it has it].
FOCUSED = """() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const name = node.ariaLabel ?? node.labels?.[0]?.textContent ?? (node.textContent || node.placeholder);
  return [name.trim(), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""

# With every fold open, a call, a thought and an error: as full as the page gets.
UNFOLD = """() => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
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


def answered(page: Playground, tab: str = "chat") -> None:
    page.open(f"?tab={tab}&probabilities=1&send=1&prompt=Tell+me+a+story+about+a+fox")
    page.until("done")


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wider_than_the_screen(browser: Browser, demo: Server, size: str) -> None:
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    with playground(browser, demo.url, viewport=viewport, has_touch=width < 500) as page:
        for tab in ("chat", "completion"):
            answered(page, tab)
            for _ in ("as it opens", "with everything unfolded"):
                assert page.page.evaluate(TOO_WIDE) == []
                assert page.page.evaluate("document.documentElement.scrollWidth") <= width
                page.page.evaluate(UNFOLD)


@pytest.mark.parametrize("theme", THEMES)
def test_texts_stand_out_from_what_lies_under_them(browser: Browser, demo: Server, theme: Any) -> None:
    with playground(browser, demo.url, color_scheme=theme) as page:
        for tab in ("chat", "completion"):
            answered(page, tab)
            page.page.evaluate(UNFOLD)
            contrasts = page.page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            assert [(round(ratio, 2), text) for ratio, text in contrasts if ratio < LEAST] == []


def test_a_theme_is_worn_and_remembered(browser: Browser, demo: Server) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    with playground(browser, demo.url, color_scheme="light") as page:
        page.open()
        light = page.page.evaluate(ground)
        page.page.emulate_media(color_scheme="dark")
        dark = page.page.evaluate(ground)
        assert light != dark
        button = page.page.get_by_role("button", name="Theme")
        button.click()
        expect(button).to_have_text("Theme: light")
        assert page.page.evaluate(ground) == light
        page.open()
        assert page.page.evaluate(ground) == light
        button.click()
        page.page.emulate_media(color_scheme="light")
        assert page.page.evaluate(ground) == dark


def test_keys_lead_everywhere_and_one_sees_where(browser: Browser, demo: Server) -> None:
    with playground(browser, demo.url) as page:
        answered(page)
        page.page.get_by_role("button", name="API key").press("Enter")
        page.panel.locator(".extras > summary").press("Enter")
        seen: dict[str, bool] = {}
        ends = 0  # of the page: where it begins again
        while ends < 2 and len(seen) < 99:
            page.page.keyboard.press("Tab")
            if page.page.evaluate("document.activeElement === document.body"):
                ends += 1
                continue
            name, visible = page.page.evaluate(FOCUSED)
            seen[name] = visible
        assert "" not in seen
        assert [name for name, visible in seen.items() if not visible] == []
        wanted = {"API key", "Theme: auto", "Settings", "temperature", "seed", "stop", "Chat", "Answers: chat", "Live"}
        wanted |= {"System prompt", "Tools, as a JSON array", "JSON schema of the answer", "Regenerate", "Copy as curl"}
        told = {name.split("\n")[0].strip() for name in seen}
        assert wanted <= told


def test_whoever_wants_no_motion_gets_none(browser: Browser, demo: Server) -> None:
    blinking = "getComputedStyle(document.querySelector('.answer'), '::after').animationName"
    for motion, name in (("no-preference", "blink"), ("reduce", "none")):
        with playground(browser, demo.url, reduced_motion=motion) as page:
            page.add_to_requests(ignore_eos=True, max_tokens=1900)
            page.open()
            page.ask("Tell me a story", until="running")
            assert page.page.evaluate(blinking) == name
            page.button("Stop").click()
            page.until("stopped")

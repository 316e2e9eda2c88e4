"""The playground in Chromium with the demo model: talking, stopping, looking inside, and a worker that is killed.

In every test an error in the console, a breach of the page's policy or a request to anywhere else is a failure.
"""

import json
import os
import re
import signal
import subprocess
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from playwright.sync_api import Browser, expect

from tests.e2e.server import Server
from tests.web.browser import program, watched
from tests.web.playground import NOTE_LENGTHS, Playground

pytestmark = pytest.mark.browser

STORY = "Tell me a story about a fox"
CAPITAL = "What is the capital of France?"
SEED = 18446744073709551615  # more than a JavaScript number can hold
ANY_TEXT = re.compile(r".{20,}", re.DOTALL)


def said(demo: Server, path: str, **fields: Any) -> str:
    """What the server answers without the page."""
    choice = demo.client.post(path, json={"model": "m", "max_tokens": 256, **fields}).json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def chatted(demo: Server, text: str, **fields: Any) -> str:
    return said(demo, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)


def test_a_chat_comes_token_by_token(here: Playground, demo: Server) -> None:
    fields = {"ignore_eos": True, "max_tokens": 1500}  # long enough to be seen coming by a slow browser
    here.add_to_requests(**fields)
    here.knob("seed", str(SEED))
    here.page.evaluate(NOTE_LENGTHS)
    here.ask(STORY)
    assert here.answer == chatted(demo, STORY, seed=SEED, **fields)
    lengths = here.page.evaluate("lengths")
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 10
    assert re.match(rf"finished: length \(.*\) · TTFT .* tokens/s · 1500 tokens .* seed {SEED}$", here.timing)


def test_a_conversation_goes_on_from_what_was_said(here: Playground, demo: Server) -> None:
    here.knob("seed", str(SEED))
    here.extra("system", "You are brief.")
    here.ask(STORY)
    first = here.answer
    here.ask(CAPITAL)
    roles = ("system", "You are brief."), ("user", STORY), ("assistant", first), ("user", CAPITAL)
    messages = [{"role": role, "content": content} for role, content in roles]
    second = said(demo, "/v1/chat/completions", messages=messages, seed=SEED)
    assert here.answer == second != ""
    here.button("Regenerate").click()
    expect(here.panel.locator(".turn")).to_have_count(2)
    here.until("done")
    assert here.answer == second
    here.button("Clear").click()
    expect(here.panel.locator(".log")).to_be_empty()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_frees_the_worker(here: Playground, demo: Server, by: str) -> None:
    here.add_to_requests(ignore_eos=True, max_tokens=1900)
    here.ask(STORY, until="running")
    expect(here.turn.locator(".answer")).to_have_text(ANY_TEXT)
    demo.until(lambda stats: stats["running"] == 1)
    if by == "button":
        here.button("Stop").click()
    else:
        here.page.keyboard.press("Escape")
    here.until("stopped")
    demo.until_idle()
    assert "stopped by you" in here.timing
    expect(here.button("Stop")).to_be_disabled()
    expect(here.panel.locator(".composer textarea")).to_be_focused()


def test_a_raw_completion(here: Playground, demo: Server) -> None:
    here.knob("temperature", "0")
    here.knob("stop", "\\n\nnever said")
    here.page.get_by_role("tab", name="Chat").press("ArrowRight")
    here.ask("Once upon a time", key="Control+Enter")
    expected = said(demo, "/v1/completions", prompt="Once upon a time", temperature=0, stop=["\n", "never said"])
    assert here.answer == expected != ""
    assert 'finished: stop "\\n"' in here.timing
    assert here.turn.locator(".question").text_content() == "Once upon a time"


@pytest.mark.parametrize("tab", ["chat", "completion"])
def test_probabilities_of_a_token(here: Playground, demo: Server, tab: str) -> None:
    """Also with keys alone."""
    here.open(f"?tab={tab}&probabilities=1")
    here.knob("seed", str(SEED))
    here.ask(STORY, key="Control+Enter")
    tokens, rivals = here.turn.locator(".answer .token"), here.page.locator("#rivals .rival")
    plain = said(demo, "/v1/completions", prompt=STORY, seed=SEED) if tab == "completion" else ""
    assert "".join(tokens.all_text_contents()) == here.answer == (plain or chatted(demo, STORY, seed=SEED))
    tokens.nth(4).click()
    expect(here.page.locator("#rivals")).to_be_visible()
    assert rivals.count() >= 5
    assert here.page.locator("#rivals .chosen").count() == 1
    shares = [float(text.strip("%< ")) for text in rivals.locator("span").all_text_contents()]
    assert 50 < sum(shares) < 101
    here.page.keyboard.press("Escape")
    expect(here.page.locator("#rivals")).to_be_hidden()
    tokens.first.focus()
    here.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    here.page.keyboard.press("Enter")
    expect(here.page.locator("#rivals")).to_be_visible()


def test_charts_move(here: Playground) -> None:
    figure = here.page.locator("#charts figure").filter(has_text="Tokens / s")
    before = figure.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    here.ask(STORY)
    expect(figure.locator(".key").first).to_have_text(re.compile(r"generated [1-9]"))
    canvas = figure.locator("canvas").element_handle()
    here.page.wait_for_function("([canvas, before]) => canvas.toDataURL() !== before", arg=[canvas, before])
    expect(figure.locator("canvas")).to_have_attribute("aria-label", re.compile(r"two minutes: generated [1-9]"))
    for title in ("TTFT", "ITL"):
        legend = here.page.locator("#charts figure").filter(has_text=title).locator(".key").first
        expect(legend).to_have_text(re.compile(r"p50 \d.*s$"))


def test_copied_curl_runs(here: Playground, demo: Server) -> None:
    here.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    here.knob("seed", "5")
    here.extra("system", 'You say "it\'s".')
    here.ask("What's the capital of France?")
    here.button("Copy as curl").click()
    expect(here.panel.get_by_role("button", name="Copied")).to_be_visible()
    command = here.page.evaluate("navigator.clipboard.readText()")
    assert "Authorization" not in command
    lines = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == here.answer != ""


def test_an_answer_keeps_to_a_schema(here: Playground) -> None:
    here.panel.locator(".extras > summary").click()
    here.panel.get_by_role("button", name="Fill in a sample").last.click()
    schema = json.loads(here.panel.locator("[name=response_format]").input_value())
    expect(here.panel.locator(".used")).to_have_text("in use: JSON schema")
    here.ask("Tell me about a cat.")
    Draft202012Validator(schema).validate(json.loads(here.answer))
    here.extra("response_format", '{"type": "object"')
    here.ask("Again.", until="failed")
    assert "the JSON schema field is not JSON" in here.error
    expect(here.panel.locator("[name=response_format]")).to_have_attribute("aria-invalid", "true")
    here.watch.expected = {422}
    here.extra("response_format", '{"type": "nonsense"}')
    expect(here.panel.locator("[name=response_format]")).not_to_have_attribute("aria-invalid", "true")
    here.ask("And again.", until="failed")
    assert here.error.startswith("422: ")
    expect(here.panel.locator("[name=response_format]")).to_have_attribute("aria-invalid", "true")


def test_an_answer_outlives_its_worker(here: Playground, demo: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True}
    whole = chatted(demo, STORY, seed=3, **fields)
    here.add_to_requests(**fields)
    here.watch.expected = {503}  # of /ready
    here.knob("seed", "3")
    here.ask(STORY, until="running")
    expect(here.turn.locator(".answer")).to_have_text(ANY_TEXT)
    before = demo.stats()["worker"]
    os.kill(before["pid"], signal.SIGKILL)
    assert len(here.answer) < len(whole)
    here.until("done")
    assert here.answer == whole
    worker = demo.until(lambda stats: stats["worker"]["pid"] not in (0, before["pid"]))["worker"]
    restarted = f"worker restarted: epoch {worker['epoch']}, pid {worker['pid']}"
    expect(here.page.locator("#events li").filter(has_text=restarted)).to_have_count(1)
    expect(here.page.locator("#facts")).to_contain_text(f"epoch {worker['epoch']}")
    expect(here.page.locator("#state")).to_have_text("ready")


def test_the_tests_notice_what_is_forbidden(browser: Browser, demo: Server) -> None:
    for wrong, told in {
        "document.body.setAttribute('style', 'color: red')": "Content Security Policy",
        "fetch('http://203.0.113.1/').catch(() => 0)": "Content Security Policy",
        "console.error('oh')": "oh",
        "setTimeout(() => { throw new Error('thrown') }); new Promise((go) => setTimeout(go, 50))": "thrown",
        "fetch('nonesuch')": "404",
    }.items():
        with pytest.raises(AssertionError, match=told), watched(browser, demo.url) as (page, _):
            page.goto(demo.url)
            page.evaluate(wrong)


def test_no_browser_is_a_failure_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PROGRAM", "/nonexistent/chrome")
    with pytest.raises(pytest.fail.Exception, match="/nonexistent/chrome not found"):
        program()

"""The playground in Chromium with the demo model: answers, stop, probabilities, charts, and a killed worker.

Every test fails on a console error, a violation of the page's policy or a request to another host.
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
from tests.web.playground import NOTE_LENGTHS, Playground, flat

pytestmark = pytest.mark.browser

STORY = "Tell me a story about a fox"
CAPITAL = "What is the capital of France?"
SEED = 18446744073709551615  # more than a JavaScript number can hold
ANY_TEXT = re.compile(r".{20,}", re.DOTALL)


def answer_of(demo: Server, path: str, **fields: Any) -> str:
    """Returns the server's answer to a request that is sent without the page."""
    choice = demo.client.post(path, json={"model": "m", "max_tokens": 256, **fields}).json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def chat_answer_of(demo: Server, text: str, **fields: Any) -> str:
    return answer_of(demo, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)


def test_chat_answer_grows_token_by_token(ui: Playground, demo: Server) -> None:
    fields = {"ignore_eos": True, "max_tokens": 1500}  # so long that even a slow browser shows the answer growing
    ui.add_to_requests(**fields)
    ui.set_field("seed", str(SEED))
    ui.page.evaluate(NOTE_LENGTHS)
    ui.send(STORY)
    assert ui.answer == flat(chat_answer_of(demo, STORY, seed=SEED, **fields))
    lengths = ui.page.evaluate("lengths")
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 10
    assert re.match(rf"finished: length \(.*\) · TTFT .* tokens/s · 1500 tokens .* seed {SEED}$", ui.timing)


def test_chat_second_question_sends_history(ui: Playground, demo: Server) -> None:
    ui.set_field("seed", str(SEED))
    ui.set_extra("system", "You are brief.")
    ui.send(STORY)
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": STORY}]
    first = answer_of(demo, "/v1/chat/completions", messages=messages, seed=SEED)
    assert ui.answer == flat(first)
    ui.send(CAPITAL)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": CAPITAL}]
    second = flat(answer_of(demo, "/v1/chat/completions", messages=messages, seed=SEED))
    assert ui.answer == second != ""
    ui.of_turn("Regenerate").click()
    expect(ui.panel.locator(".turn")).to_have_count(2)
    ui.wait_for_state("done")
    assert ui.answer == second
    ui.button("New").click()
    expect(ui.panel.locator(".log")).to_be_empty()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_by_button_or_key_frees_the_worker(ui: Playground, demo: Server, by: str) -> None:
    ui.add_to_requests(ignore_eos=True, max_tokens=1900)
    ui.send(STORY, until="running")
    expect(ui.turn.locator(".answer")).to_have_text(ANY_TEXT)
    demo.until(lambda stats: stats["running"] == 1)
    if by == "button":
        ui.button("Stop").click()
    else:
        ui.page.keyboard.press("Escape")
    ui.wait_for_state("stopped")
    demo.until_idle()
    assert "stopped by you" in ui.timing
    expect(ui.button("Stop")).to_be_disabled()
    expect(ui.panel.locator(".composer textarea")).to_be_focused()


def test_completion_tab_equals_completions_api(ui: Playground, demo: Server) -> None:
    ui.set_field("temperature", "0")
    ui.set_field("stop", "\\n\nnever said")
    ui.page.get_by_role("tab", name="Chat").press("ArrowRight")
    ui.send("Once upon a time", key="Control+Enter")
    expected = answer_of(demo, "/v1/completions", prompt="Once upon a time", temperature=0, stop=["\n", "never said"])
    assert ui.answer == flat(expected) != ""
    assert 'finished: stop "\\n"' in ui.timing
    assert ui.turn.locator(".question").text_content() == "Once upon a time"


@pytest.mark.parametrize("tab", ["chat", "completion"])
def test_token_click_shows_probabilities(ui: Playground, demo: Server, tab: str) -> None:
    """A click on a token shows its probabilities, and so does the keyboard alone."""
    ui.open(f"?tab={tab}&probabilities=1")
    ui.set_field("seed", str(SEED))
    ui.send(STORY, key="Control+Enter")
    tokens, rivals = ui.turn.locator(".answer .token"), ui.page.locator("#rivals .rival")
    plain = answer_of(demo, "/v1/completions", prompt=STORY, seed=SEED) if tab == "completion" else ""
    assert (
        flat("".join(tokens.all_text_contents())) == ui.answer == flat(plain or chat_answer_of(demo, STORY, seed=SEED))
    )
    tokens.nth(4).click()
    expect(ui.page.locator("#rivals")).to_be_visible()
    assert rivals.count() >= 5
    assert ui.page.locator("#rivals .chosen").count() == 1
    shares = [float(text.strip("%< ")) for text in rivals.locator("span").all_text_contents()]
    assert 50 < sum(shares) < 101
    ui.page.keyboard.press("Escape")
    expect(ui.page.locator("#rivals")).to_be_hidden()
    tokens.first.focus()
    ui.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    ui.page.keyboard.press("Enter")
    expect(ui.page.locator("#rivals")).to_be_visible()


def test_charts_after_answer_show_new_values(ui: Playground) -> None:
    figure = ui.page.locator("#charts figure").filter(has_text="Tokens / s")
    before = figure.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    ui.send(STORY)
    expect(figure.locator(".key").first).to_have_text(re.compile(r"generated [1-9]"))
    canvas = figure.locator("canvas").element_handle()
    ui.page.wait_for_function("([canvas, before]) => canvas.toDataURL() !== before", arg=[canvas, before])
    expect(figure.locator("canvas")).to_have_attribute("aria-label", re.compile(r"two minutes: generated [1-9]"))
    for title in ("TTFT", "ITL"):
        legend = ui.page.locator("#charts figure").filter(has_text=title).locator(".key").first
        expect(legend).to_have_text(re.compile(r"p50 \d.*s$"))


def test_copied_curl_command_gives_the_same_answer(ui: Playground, demo: Server) -> None:
    ui.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ui.set_field("seed", "5")
    ui.set_extra("system", 'You say "it\'s".')
    ui.send("What's the capital of France?")
    ui.button("Copy as curl").click()
    expect(ui.panel.get_by_role("button", name="Copied")).to_be_visible()
    command = ui.page.evaluate("navigator.clipboard.readText()")
    assert "Authorization" not in command
    lines = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert flat("".join(choice["delta"].get("content") or "" for choice in choices)) == ui.answer != ""


def test_schema_constrains_answer_and_invalid_schema_is_marked(ui: Playground) -> None:
    ui.panel.locator(".extras > summary").click()
    ui.panel.get_by_role("button", name="Fill in a sample").last.click()
    schema = json.loads(ui.panel.locator("[name=response_format]").input_value())
    expect(ui.panel.locator(".used")).to_have_text("in use: JSON schema")
    ui.send("Tell me about a cat.")
    Draft202012Validator(schema).validate(json.loads(ui.answer))
    ui.set_extra("response_format", '{"type": "object"')
    ui.send("Again.", until="failed")
    assert "the JSON schema field is not JSON" in ui.error
    expect(ui.panel.locator("[name=response_format]")).to_have_attribute("aria-invalid", "true")
    ui.watch.expected_statuses = {400}
    ui.set_extra("response_format", '{"enum": []}')
    expect(ui.panel.locator("[name=response_format]")).not_to_have_attribute("aria-invalid", "true")
    ui.send("And again.", until="failed")
    assert ui.error.startswith("400: ")
    expect(ui.panel.locator("[name=response_format]")).to_have_attribute("aria-invalid", "true")


def test_answer_with_killed_worker_is_complete(ui: Playground, demo: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True}
    expected = chat_answer_of(demo, STORY, seed=3, **fields)
    ui.add_to_requests(**fields)
    ui.watch.expected_statuses = {503}  # the status of /ready
    ui.set_field("seed", "3")
    ui.send(STORY, until="running")
    expect(ui.turn.locator(".answer")).to_have_text(ANY_TEXT)
    before = demo.stats()["worker"]
    os.kill(before["pid"], signal.SIGKILL)
    assert len(ui.answer) < len(expected)
    ui.wait_for_state("done")
    assert ui.answer == flat(expected)
    worker = demo.until(lambda stats: stats["worker"]["pid"] not in (0, before["pid"]))["worker"]
    restarted = f"worker restarted: epoch {worker['epoch']}, pid {worker['pid']}"
    expect(ui.page.locator("#events li").filter(has_text=restarted)).to_have_count(1)
    expect(ui.page.locator("#facts")).to_contain_text(f"epoch {worker['epoch']}")
    expect(ui.page.locator("#state")).to_have_text("ready")


def test_watched_page_with_forbidden_action_fails(browser: Browser, demo: Server) -> None:
    for script, message in {
        "document.body.setAttribute('style', 'color: red')": "Content Security Policy",
        "fetch('http://203.0.113.1/').catch(() => 0)": "Content Security Policy",
        "console.error('oh')": "oh",
        "setTimeout(() => { throw new Error('thrown') }); new Promise((go) => setTimeout(go, 50))": "thrown",
        "fetch('nonesuch')": "404",
    }.items():
        with pytest.raises(AssertionError, match=message), watched(browser, demo.url) as (page, _):
            page.goto(demo.url)
            page.evaluate(script)


def test_program_missing_fails_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PROGRAM", "/nonexistent/chrome")
    with pytest.raises(pytest.fail.Exception, match="/nonexistent/chrome not found"):
        program()

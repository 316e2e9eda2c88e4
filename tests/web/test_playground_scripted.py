"""The playground with a scripted model: reasoning, tool calls, API keys, refusals, failures, lost servers."""

import json
import re
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.sync_api import Route, expect

from frontend.errors import Overloaded
from frontend.workers.status import READY, ConnectionState, WorkerStatus, not_ready
from shared.messages import Outcome
from tests.fakes import READY_STATUS
from tests.frontend.speaking import Model
from tests.web.playground import GENERATION
from tests.web.scripted_server import served

pytestmark = pytest.mark.browser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
KEY = "sk-of-alice"
OpenPlayground = Callable[..., Any]


@pytest.mark.parametrize("query", ["", "?probabilities=1"])
def test_reasoning_is_folded_and_tool_results_continue_chat(
    model: Model, open_playground: OpenPlayground, query: str
) -> None:
    paris, oslo = CALL % "Paris", CALL % "Oslo"
    model.says = [
        f"<think>\nTwo cities.\n</think>\n\nI look.\n{paris}\n{oslo}",
        "<think>\nGood.\n</think>\n\nSun and snow.",
        "<think>\nAgain.\n</think>\n\nStill <b>sun</b>.",
    ]
    with served(model) as url, open_playground(url) as ui:
        ui.open(query)
        ui.panel.locator(".extras > summary").click()
        ui.panel.get_by_role("button", name="Fill in a sample").first.click()
        ui.send("Weather in Paris and Oslo?")
        expect(ui.turn.locator(".thoughts")).to_be_hidden()
        ui.turn.locator(".thought > summary").click()
        expect(ui.turn.locator(".thoughts")).to_have_text("Two cities.")
        assert ui.answer.strip() == "I look."
        assert ui.turn.locator(".name").all_text_contents() == ["get_weather", "get_weather"]
        assert ui.turn.locator(".arguments").all_text_contents() == ['{"city": "Paris"}', '{"city": "Oslo"}']
        results = ui.turn.get_by_label("Its result")
        results.nth(0).fill("sun")
        results.nth(1).fill("snow")
        ui.turn.get_by_role("button", name="Go on with these results").click()
        expect(ui.panel.locator(".turn")).to_have_count(2)
        ui.wait_for_state("done")
        assert ui.answer == "Sun and snow."
        assert ui.panel.get_by_role("button", name="Go on").count() == 0
        ui.of_turn("Regenerate").click()
        expect(ui.turn.locator(".answer")).to_have_text("Still <b>sun</b>.")
    first, *after = model.prompts
    assert '"get_weather"' in first
    results_given = re.compile(r"Two cities\..*Paris.*Oslo.*<tool_response>\nsun\n.*<tool_response>\nsnow\n", re.DOTALL)
    assert all(map(results_given.search, after)) and len(after) == 2


def test_tools_invalid_or_refused_show_error(model: Model, open_playground: OpenPlayground) -> None:
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.set_extra("tools", "get_weather()")
        ui.send("Weather?", until="failed")
        assert "the tools field is not JSON" in ui.error
        ui.watch.expected_statuses = {400, 422}
        ui.set_extra("tools", '[{"type": "function", "function": {"parameters": {}}}]')
        ui.send("Weather?", until="failed")
        assert re.match(r"4\d\d: .*`tools\[0\]", ui.error)
        expect(ui.panel.locator("[name=tools]")).to_have_attribute("aria-invalid", "true")
        assert model.prompts == []


def test_api_key_is_requested_checked_and_kept_in_tab(
    model: Model, open_playground: OpenPlayground, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} alice\n")
    keys.chmod(0o600)
    model.says = ["Hello.", "Hello."]
    with served(model, api_keys=str(keys)) as url, open_playground(url) as ui:
        ui.watch.expected_statuses = {401}
        ui.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ui.open()
        hint, field = ui.page.locator("#hint"), ui.page.get_by_label("API key", exact=True)
        expect(hint).to_have_text("This server wants an API key.")
        urls: list[str] = []
        ui.page.on("request", lambda request: urls.append(request.url))
        for _ in range(2):
            ui.page.wait_for_event("request", lambda request: request.url.endswith("/ready"))
        assert f"{url}/stats" not in urls  # no request before another key is entered
        ui.send("Hi", until="failed")
        assert ui.error.startswith("401: the API key is missing or wrong. Put a key into the field")
        field.fill("sk-wröng")
        field.press("Enter")
        expect(hint).to_contain_text("No key looks like this")
        field.fill("sk-wrong")
        ui.page.get_by_role("button", name="Use it").click()
        expect(hint).to_have_text("This server does not know this key.")
        field.fill(KEY)
        field.press("Enter")
        expect(hint).to_contain_text("The server accepts this key.")
        expect(ui.page.locator("#facts")).to_contain_text("tiny")  # the name from /stats
        ui.of_turn("Regenerate").click()
        ui.wait_for_state("done")
        assert ui.answer == "Hello."
        expect(field).to_be_hidden()
        ui.button("Copy as curl").click()
        expect(ui.panel.get_by_role("button", name="Copied")).to_be_visible()
        command = ui.page.evaluate("navigator.clipboard.readText()")
        assert '-H "Authorization: Bearer $API_KEY"' in command and KEY not in command
        answer = subprocess.run(["bash", "-c", f"API_KEY={KEY}\n{command}"], capture_output=True, text=True, check=True)
        assert answer.stdout.endswith("data: [DONE]\n\n")
        stored = "[Object.values({...localStorage}).join(), document.cookie, location.href].join()"
        assert KEY not in ui.page.evaluate(stored)
        ui.open()
        expect(ui.page.locator("#facts")).to_contain_text("tiny")
        ui.page.get_by_role("button", name="API key").click()
        ui.page.get_by_role("button", name="Forget it").click()
        expect(hint).to_have_text("This server wants an API key.")
        assert ui.page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("path", ["stats", "v1/models"])
def test_late_refusal_of_an_earlier_key_says_nothing_of_the_new_one(
    model: Model, open_playground: OpenPlayground, tmp_path: Path, path: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} alice\n")
    keys.chmod(0o600)
    late: list[Route] = []

    def hold(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer sk-wrong":
            late.append(route)
        else:
            route.continue_()

    with served(model, api_keys=str(keys)) as url, open_playground(url) as ui:
        ui.watch.expected_statuses = {401}
        ui.open()
        hint, field = ui.page.locator("#hint"), ui.page.get_by_label("API key", exact=True)
        ui.page.route(f"{url}/{path}", hold)
        field.fill("sk-wrong")
        field.press("Enter")
        expect(hint).to_have_text("This server does not know this key.")
        field.fill(KEY)
        field.press("Enter")
        expect(hint).to_contain_text("The server accepts this key.")
        for route in late:
            with ui.page.expect_response(lambda response: response.status == 401):
                route.continue_()
        ui.page.wait_for_event("response", lambda response: response.url == f"{url}/stats")
        expect(hint).to_contain_text("The server accepts this key.")
        expect(ui.page.locator("#facts")).to_contain_text("tiny")
    assert late


def test_api_key_not_required_is_not_requested(model: Model, open_playground: OpenPlayground) -> None:
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        expect(ui.page.locator("#facts")).to_contain_text("tiny")
        expect(ui.page.locator("#access")).to_be_hidden()
        expect(ui.page.get_by_role("button", name="API key")).to_have_attribute("aria-expanded", "false")


def test_refusals_are_shown_beside_the_question(model: Model, open_playground: OpenPlayground) -> None:
    model.pool.refusals[0] = Overloaded("the queue is full", code="queue_full", retry_after=7)
    model.says = ["Good day."]
    with served(model) as url, open_playground(url) as ui:
        ui.watch.expected_statuses = {400, 503}
        ui.open()
        ui.send("First", until="failed")
        assert ui.error == "503: the queue is full. Try again in 7 s."
        ui.set_field("top_p", "5")
        ui.send("Second", until="failed")
        assert ui.error.startswith("400: `top_p` must be")
        expect(ui.settings.locator("[name=top_p]")).to_have_attribute("aria-invalid", "true")
        ui.set_field("top_p", "")
        ui.send("<img src=x onerror=alert(1)>")
        assert ui.answer == "Good day."
        assert ui.panel.locator(".error:visible").count() == 2
        assert ui.panel.locator("img").count() == 0
    (prompt,) = model.prompts
    assert "First" not in prompt and "Second" not in prompt


def test_error_in_midstream_keeps_partial_answer(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["Half an answer", "<think>\nHalf a thought"]
    model.outcome = Outcome.ERROR
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Hi", until="failed")
        assert ui.answer == "Half an answer"
        assert ui.error and "finished: " not in ui.timing
        ui.send("Hi again", until="failed")
        expect(ui.turn.locator(".thought > summary")).to_have_text(re.compile("^Thought, not to its end, for "))


def test_answer_waiting_for_worker_shows_notice(model: Model, open_playground: OpenPlayground) -> None:
    notice = "getComputedStyle(document.querySelector('.timing'), '::before').content"
    arrived = threading.Event()
    model.pool.play = lambda pool, stream: arrived.set()
    with served(model) as url, open_playground(url) as ui:
        ui.watch.expected_statuses = {503}
        ui.open()
        ui.send("Hi", until="running")
        assert arrived.wait(30)  # only then is the server made not ready, or it would refuse the request
        assert ui.page.evaluate(notice) == "none"
        model.pool.readiness = not_ready("the worker is lost")
        expect(ui.page.locator("#state")).to_have_text("not ready: the worker is lost")
        ui.page.wait_for_function(f"() => {notice}.includes('This answer goes on')")
        model.pool.readiness = READY
        expect(ui.page.locator("#state")).to_have_text("ready")
        assert ui.page.evaluate(notice) == "none"
        ui.button("Stop").click()
        ui.wait_for_state("stopped")


def test_answers_go_on_by_themselves_when_a_lost_server_is_back(model: Model, open_playground: OpenPlayground) -> None:
    (hi,) = model.tokenizer.encode_now(["Hi"], False)
    whole = model.pool.play
    model.pool.play = lambda pool, stream: pool.later(partial(pool.send_tokens, stream, hi))  # the stream has no end
    with ExitStack() as first:
        url = first.enter_context(served(model))
        with open_playground(url) as ui:
            ui.watch.expected_statuses = {0}
            ui.open()
            ui.send("Hi", until="running")
            expect(ui.turn.locator(".answer")).to_have_text("Hi")
            first.close()
            said = "This answer goes on by itself when the server is back."
            expect(ui.turn.locator(".timing")).to_contain_text(said)
            assert ui.answer == "Hi"
            expect(ui.page.locator("#state")).to_have_text("not ready: the server cannot be reached")
            ui.button("New").click()
            ui.send("Anybody there?", until="running")
            expect(ui.turn.locator(".timing")).to_have_text(f"The server cannot be reached. {said}")
            ui.button("Stop").click()
            ui.wait_for_state("stopped")
            model.pool.play = whole
            model.says = ["Hi there."]
            with served(model, int(url.rpartition(":")[2])):
                expect(ui.page.locator("#state")).to_have_text("ready")
                events = ui.page.locator("#events li").all_text_contents()
                assert [event[9:] for event in events] == ["ready", "not ready: the server cannot be reached", "ready"]
                ui.page.get_by_role("link", name="Hi", exact=True).click()
                ui.wait_for_state("done")
                assert ui.answer == "Hi there." and "taken up again" in ui.timing


def test_answer_whose_connection_is_always_cut_is_not_asked_for_forever(
    model: Model, open_playground: OpenPlayground
) -> None:
    with served(model) as url, open_playground(url) as ui:
        ui.watch.expected_statuses = {502}
        asked: list[Route] = []
        ui.page.route(GENERATION, lambda route: (asked.append(route), route.fulfill(status=502, body="<h1>Bad</h1>")))
        ui.open()
        ui.send("Hi", until="failed")
        assert len(asked) == 5 and ui.error == "502: the server answered 502 Bad Gateway."


def test_several_workers_are_counted_and_named(model: Model, open_playground: OpenPlayground) -> None:
    pages = replace(READY_STATUS.pages, free=9, cached=0, owned=1)
    statuses = {"a": replace(READY_STATUS, pages=pages), "b": replace(READY_STATUS, pages=pages, epoch=5)}
    model.pool.statuses = lambda: [  # type: ignore[method-assign]
        WorkerStatus(name, ConnectionState.READY if name == "a" else ConnectionState.LOST, "", status)
        for name, status in statuses.items()
    ]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        expect(ui.page.locator("#facts")).to_contain_text("1 of 2 workers ready")
        requests = ui.page.locator("#charts figure").filter(has_text="Requests").locator(".key")
        expect(requests).to_have_text(["running 4", "waiting 2"])
        cache = ui.page.locator("#charts figure").filter(has_text="K/V cache").locator(".key")
        expect(cache).to_have_text(["in use 10 %", "reusable 0 %"])
        statuses["b"] = replace(statuses["b"], epoch=6, pid=12)
        restarts = ui.page.locator("#events li").filter(has_text="restarted")
        expect(restarts).to_have_text([re.compile("worker b restarted: epoch 6, pid 12")])


def test_model_is_chosen_among_several_and_stays_chosen(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["First.", "Second.", "Third."]
    asked: list[str] = []
    sampling: list[tuple[float | None, float | None]] = []

    def answer_as_the_only_model(route: Route) -> None:
        body = route.request.post_data_json
        asked.append(body.pop("model"))
        sampling.append((body.get("temperature"), body.get("top_p")))
        route.continue_(post_data=json.dumps(body))

    with served(model) as url, open_playground(url) as ui:
        ui.open()
        expect(ui.page.locator("#chooser")).to_be_hidden()
        listed = ui.page.request.get(f"{url}/v1/models").json()
        name = listed["data"][0]["id"]
        listed["data"] += [
            {
                "id": "poet",
                "object": "model",
                "parent": name,
                "recommended_sampling": {"temperature": 0.2, "top_p": 0.9},
            },
            {"id": "large", "object": "model", "status": {"value": "unloaded"}},
        ]
        ui.page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        ui.page.route(GENERATION, answer_as_the_only_model)
        ui.open()
        expect(ui.page.locator("#model option")).to_have_text([name, "poet (adapter)", "large (unloaded)"])
        ui.send("Who are you?")
        expect(ui.turn.locator(".answer")).to_have_text("First.")
        temperature = ui.page.locator("#knobs [name=temperature]")
        expect(temperature).to_have_attribute("placeholder", "1")
        ui.page.locator("#model").select_option("poet")
        expect(temperature).to_have_attribute("placeholder", "0.2")
        ui.send("And now?")
        expect(ui.turn.locator(".answer")).to_have_text("Second.")
        ui.page.reload()
        expect(ui.page.locator("#model")).to_have_value("poet")
        ui.set_field("temperature", "0.5")
        ui.send("And after that?")
        expect(ui.turn.locator(".answer")).to_have_text("Third.")
        assert asked == [name, "poet", "poet"]
        assert sampling == [(None, None), (0.2, 0.9), (0.5, 0.9)]

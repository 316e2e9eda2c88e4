"""Conversations of the playground: stored, continued after a reload, branched, searched, exported, shared by tabs."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Locator, Page, Route, expect

from frontend.workers.stream import Stream
from tests.e2e.server import Server
from tests.fakes import FakePool
from tests.frontend.kept.harness import Held
from tests.frontend.speaking import Model
from tests.web.browser import Watch
from tests.web.playground import GENERATION, Playground, flat
from tests.web.scripted_server import served

pytestmark = pytest.mark.browser

OpenPlayground = Callable[..., Any]
STORY = "Tell me a story about a fox"
LONG = {"ignore_eos": True, "max_tokens": 1500}


def bodies(page: Page) -> list[dict[str, Any]]:
    """Returns a list to which the bodies of the page's later requests for answers are added."""
    seen: list[dict[str, Any]] = []
    page.on("request", lambda each: seen.append(each.post_data_json) if GENERATION.search(each.url) else None)
    return seen


def answer_to(demo: Server, body: dict[str, Any]) -> str:
    """Returns the whole answer of the server to a request of the page."""
    fields = body | {"stream": False}
    del fields["stream_options"]
    message = demo.client.post("/v1/chat/completions", json=fields).json()["choices"][0]["message"]
    return str(message["content"])


def titles(ui: Playground) -> list[str]:
    return ui.page.locator("#list a").all_text_contents()


def begun(ui: Playground, *questions: str) -> None:
    """Begins a conversation with each question."""
    for question in questions:
        ui.button("New").click() if ui.button("New").is_enabled() else None
        ui.send(question)


def of_list(ui: Playground, name: str) -> Locator:
    return ui.page.locator("#history").get_by_role("button", name=name)


def sends_beginning(model: Model, text: str, count: int) -> None:
    """Makes the next answers stop after `count` tokens of the text, without an end."""
    (ids,) = model.tokenizer.encode_now([text], False)

    def play(pool: FakePool, stream: Stream) -> None:
        pool.later(partial(pool.send_tokens, stream, ids[:count]))

    model.pool.play = play


def sends_whole(model: Model, *texts: str) -> None:
    model.says[:] = texts
    model.pool.play = model._play


def other_tab(ui: Playground, url: str) -> Playground:
    page = ui.page.context.new_page()
    tab = Playground(page, Watch(page, url), url)
    return tab


@pytest.mark.parametrize("query", ["", "?probabilities=1"])
def test_reload_in_midstream_takes_the_answer_up_and_gives_the_same_bytes(
    ui: Playground, demo: Server, query: str
) -> None:
    ui.open(query)
    ui.add_to_requests(**LONG)
    sent = bodies(ui.page)
    ui.send(STORY, until="running")
    expect(ui.turn.locator(".answer")).to_have_text(re.compile(".{200,}", re.DOTALL))
    ui.page.reload()
    expect(ui.turn.locator(".answer")).not_to_be_empty()
    before = ui.answer
    ui.wait_for_state("done")
    first, second = sent
    assert first == second and "seed" in first
    assert ui.kept_text == answer_to(demo, first | LONG)
    assert ui.answer == flat(ui.kept_text) and ui.answer.startswith(before) and len(before) > 50
    assert "taken up again" in ui.timing and f"seed {first['seed']}" in ui.timing
    ui.page.reload()
    expect(ui.turn.locator(".answer")).not_to_be_empty()
    assert ui.answer == flat(ui.kept_text)
    assert len(sent) == 2
    assert ui.turn.locator(".token").count() == (1500 if query else 0)


@pytest.fixture
def kept(model: Model, open_playground: OpenPlayground, tmp_path: Path) -> Iterator[tuple[Held, Playground]]:
    """A model that has begun an answer, and the page that shows it; the server keeps answers."""
    held = Held(model.tokenizer, "It was a quick brown fox.")
    held.allowed = 9
    slow = SimpleNamespace(pool=held.pool, tokenizer=model.tokenizer)
    with served(slow, store=str(tmp_path / "answers.db")) as url, open_playground(url) as ui:
        ui.open()
        ui.send(STORY, until="running")
        expect(ui.turn.locator(".answer")).to_have_text("It was a")
        yield held, ui


def test_kept_answer_goes_on_after_a_reload_and_is_not_computed_again(kept: tuple[Held, Playground]) -> None:
    held, ui = kept
    sent = bodies(ui.page)
    ui.page.reload()
    expect(ui.turn.locator(".answer")).to_have_text("It was a")
    held.finish()
    ui.wait_for_state("done")
    assert ui.kept_text == ui.answer == "It was a quick brown fox."
    assert not sent and len(held.streams) == 1 and "taken up again" in ui.timing


def test_answers_kept_for_the_key_are_listed_and_opened_in_another_browser(
    model: Model, open_playground: OpenPlayground, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    held = Held(model.tokenizer, "It was a quick brown fox.")
    held.allowed = 9
    slow = SimpleNamespace(pool=held.pool, tokenizer=model.tokenizer)
    rows = "#kept-list li"

    def enter(ui: Playground, key: str) -> None:
        ui.watch.expected_statuses.add(401)
        ui.open()
        expect(ui.page.locator("#kept")).to_be_hidden()
        ui.page.locator("#secret").fill(key)
        ui.page.get_by_role("button", name="Use it").click()

    def opened(ui: Playground) -> None:
        ui.page.locator("#kept > summary").click()

    with served(slow, store=str(tmp_path / "answers.db"), api_keys=str(keys)) as url:
        with open_playground(url) as ui:
            enter(ui, "k1")
            ui.send(STORY, until="running")
            expect(ui.turn.locator(".answer")).to_have_text("It was a")
        with open_playground(url) as other:
            enter(other, "k2")
            opened(other)
            expect(other.page.locator("#kept-said")).to_contain_text("keeps no answer")
            expect(other.page.locator(rows)).to_have_count(0)
        with open_playground(url) as again:
            enter(again, "k1")
            opened(again)
            expect(again.page.locator(rows)).to_have_count(1)
            expect(again.page.locator(f"{rows} .status")).to_contain_text("running")
            again.page.locator(f"{rows} button").click()
            expect(again.turn.locator(".question")).to_have_text(STORY)
            expect(again.turn.locator(".answer")).to_have_text("It was a")
            held.finish()
            again.wait_for_state("done")
            assert again.kept_text == "It was a quick brown fox." and len(held.streams) == 1
            assert titles(again) == [STORY]


def test_stopped_answer_is_not_kept(kept: tuple[Held, Playground]) -> None:
    held, ui = kept
    with ui.page.expect_response(lambda answer: answer.request.method == "DELETE") as gone:
        ui.button("Stop").click()
    assert gone.value.status == 204
    ui.wait_for_state("stopped")
    (stream,) = held.streams
    assert stream.end is not None and ui.kept_text == "It was a "


def test_answers_of_a_deleted_conversation_are_deleted_from_the_server(kept: tuple[Held, Playground]) -> None:
    held, ui = kept
    held.finish()
    ui.wait_for_state("done")
    with ui.page.expect_response(lambda answer: answer.request.method == "DELETE") as gone:
        of_list(ui, "Delete Tell").click()
    assert gone.value.status == 204
    assert ui.page.request.get(gone.value.url).status == 404
    of_list(ui, "Undo").click()
    ui.page.locator("#list a").click()
    expect(ui.turn.locator(".answer")).to_have_text("It was a quick brown fox.")


def test_kept_answer_goes_on_by_itself_when_its_frontend_is_back(
    model: Model, open_playground: OpenPlayground, tmp_path: Path
) -> None:
    held = Held(model.tokenizer, "It was a quick brown fox.")
    held.allowed = 9
    slow = SimpleNamespace(pool=held.pool, tokenizer=model.tokenizer)
    store = str(tmp_path / "answers.db")
    with ExitStack() as first:
        url = first.enter_context(served(slow, store=store))
        with open_playground(url) as ui:
            ui.watch.expected_statuses = {0}
            sent = bodies(ui.page)
            ui.open()
            ui.send(STORY, until="running")
            expect(ui.turn.locator(".answer")).to_have_text("It was a")
            first.close()
            expect(ui.turn.locator(".timing")).to_contain_text("goes on by itself when the server is back")
            assert ui.answer == "It was a"
            held.finish()
            with served(slow, int(url.rpartition(":")[2]), store=store):
                ui.wait_for_state("done")
                assert ui.kept_text == ui.answer == "It was a quick brown fox."
                assert len(sent) == 1 and "taken up again" in ui.timing


def test_answer_stopped_before_its_first_token_is_not_computed(
    model: Model, open_playground: OpenPlayground, tmp_path: Path
) -> None:
    held = Held(model.tokenizer, "It was a quick brown fox.")
    slow = SimpleNamespace(pool=held.pool, tokenizer=model.tokenizer)
    with served(slow, store=str(tmp_path / "answers.db")) as url, open_playground(url) as ui:
        ui.open()
        with ui.page.expect_response(GENERATION):
            ui.send(STORY, until="running")
        with ui.page.expect_response(lambda answer: answer.request.method == "DELETE") as gone:
            ui.button("Stop").click()
        assert gone.value.status == 204
        ui.wait_for_state("stopped")
        (stream,) = held.streams
        assert stream.end is not None


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
        {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None},
        {"total_tokens": 9},
    ],
    ids=["three counts", "no details", "one count"],
)
def test_answer_of_another_server_is_shown_once_and_the_next_question_is_sent(
    model: Model, open_playground: OpenPlayground, usage: dict[str, Any]
) -> None:
    def other_server(route: Route) -> None:
        """Answers as a server or proxy that counts less, and has no times of its own."""
        answer = route.fetch()
        lines = []
        for line in answer.text().split("\n"):
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            if chunk.get("usage"):
                chunk = {"id": "x", "object": "chat.completion.chunk", "usage": usage, "timings": {"prompt_ms": 3}}
            lines.append(f"data: {json.dumps(chunk)}" if chunk else line)
        route.fulfill(response=answer, body="\n".join(lines))

    sends_whole(model, "First.", "Second.")
    with served(model) as url, open_playground(url) as ui:
        ui.page.route(GENERATION, other_server)
        ui.open()
        ui.send("Who are you?")
        expect(ui.turn.locator(".answer")).to_have_text("First.")
        ui.page.reload()
        expect(ui.panel.locator(".turn")).to_have_count(1)
        expect(ui.turn.locator(".answer")).to_have_text("First.")
        assert "finished: stop" in ui.timing and "cached" not in ui.timing and "queue" not in ui.timing
        ui.send("And now?")
        expect(ui.turn.locator(".answer")).to_have_text("Second.")
        expect(ui.panel.locator(".turn")).to_have_count(2)
        ui.page.reload()
        expect(ui.panel.locator(".turn")).to_have_count(2)
        expect(ui.panel.locator(".question")).to_have_text(["Who are you?", "And now?"])


def test_reload_keeps_thought_and_calls_and_adds_the_rest(model: Model, open_playground: OpenPlayground) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    text = f"<think>\nIt asks for Paris.\n</think>\n\nI look.\n{call}"
    (ids,) = model.tokenizer.encode_now([text], False)
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.set_extra("tools", '[{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]')
        for count in (12, len(ids) - 20):
            sends_beginning(model, text, count)
            ui.send("Weather?", until="running") if not titles(ui) else ui.page.reload()
            expect(ui.turn.locator(".thoughts")).to_contain_text("It ")
            ui.page.wait_for_timeout(1100)  # the page stores the received text once a second
        assert json.loads(ui.panel.locator("[name=tools]").input_value())[0]["type"] == "function"
        sends_whole(model, text, "Sunny.")
        ui.page.reload()
        ui.wait_for_state("done")
        assert ui.turn.locator(".thoughts").text_content() == "It asks for Paris."
        assert ui.answer.strip() == "I look."
        assert ui.turn.locator(".arguments").all_text_contents() == ['{"city": "Paris"}']
        ui.page.reload()
        ui.turn.get_by_label("Its result").fill("sun")
        ui.turn.get_by_role("button", name="Go on with this result").click()
        expect(ui.turn.locator(".answer")).to_have_text("Sunny.")
        ui.page.reload()
        expect(ui.panel.get_by_label("Its result")).to_have_value("sun")
        expect(ui.panel.get_by_label("Its result")).to_have_attribute("readonly", "")


def test_reload_with_another_model_behind_keeps_the_text_and_says_so(
    model: Model, open_playground: OpenPlayground
) -> None:
    sends_beginning(model, "Once upon a time there was a fox.", 20)
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Hi", until="running")
        expect(ui.turn.locator(".answer")).to_contain_text("Once upon a time")
        sends_whole(model, "Once more.")
        ui.page.reload()
        ui.wait_for_state("failed")
        assert ui.answer.startswith("Once upon")
        assert "another text for this request" in ui.error


def test_stopped_answer_goes_on_to_the_same_bytes(ui: Playground, demo: Server) -> None:
    ui.add_to_requests(**LONG)
    sent = bodies(ui.page)
    ui.send(STORY, until="running")
    expect(ui.turn.locator(".answer")).to_have_text(re.compile(".{100,}", re.DOTALL))
    ui.button("Stop").click()
    ui.wait_for_state("stopped")
    ui.page.reload()
    ui.of_turn("Go on").click()
    ui.wait_for_state("done")
    assert ui.kept_text == answer_to(demo, sent[0] | LONG)
    expect(ui.of_turn("Go on")).to_be_hidden()


def test_answer_goes_on_while_another_conversation_is_shown(model: Model, open_playground: OpenPlayground) -> None:
    sends_beginning(model, "A long answer", 6)
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("First", until="running")
        expect(ui.turn.locator(".answer")).to_have_text("A long")
        ui.button("New").click()
        sends_whole(model, "Second answer.")
        ui.send("Second")
        expect(ui.page.locator("#list .running:visible")).to_have_count(1)
        ui.page.get_by_role("link", name="First").click()
        expect(ui.turn.locator(".answer")).to_have_text("A long")
        ui.page.get_by_role("link", name="Second").click()
        sends_whole(model, "A long answer")
        ui.page.reload()
        expect(ui.page.locator("#list .running:visible")).to_have_count(0)
        ui.page.get_by_role("link", name="First").click()
        expect(ui.turn.locator(".answer")).to_have_text("A long answer")


# Runs in the page: the next read of turns lasts until `reading` is false, and nothing can be written meanwhile.
HOLD_READING = """() => {
  const getAll = IDBIndex.prototype.getAll;
  window.reading = null;
  IDBIndex.prototype.getAll = function (...key) {
    const again = () => reading && (this.objectStore.count().onsuccess = again);
    if (this.name === "conversation" && reading === null) {
      window.reading = true;
      again();
    }
    return getAll.apply(this, key);
  };
}"""


def test_answer_that_ends_while_its_conversation_is_opened_is_shown_whole(
    model: Model, open_playground: OpenPlayground
) -> None:
    held = Held(model.tokenizer, "It was a quick brown fox.")
    held.allowed = 9
    with served(SimpleNamespace(pool=held.pool, tokenizer=model.tokenizer)) as url, open_playground(url) as ui:
        ui.open()
        ui.send("First", until="running")
        expect(ui.turn.locator(".answer")).to_have_text("It was a")
        ui.button("New").click()
        ui.page.evaluate(HOLD_READING)
        ui.page.get_by_role("link", name="First").click()
        ui.page.wait_for_function("reading")
        held.finish()
        while held.streams[0].end is None:
            ui.page.wait_for_timeout(20)
        ui.page.wait_for_timeout(200)  # the page has received the end, or the test shows less
        ui.page.evaluate("() => void (window.reading = false)")
        ui.wait_for_state("done")
        assert ui.answer == "It was a quick brown fox."


def test_click_on_a_conversation_is_not_lost_to_a_drawing_of_the_list(
    model: Model, open_playground: OpenPlayground
) -> None:
    rename = "({change}) => change(location.hash.slice(1), (shown) => (shown.title = 'Other'))"
    model.says = ["One.", "Two."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        begun(ui, "First", "Second")
        ui.page.get_by_role("link", name="First").hover()
        ui.page.mouse.down()
        ui.page.evaluate(f"import('/web/store.js').then({rename})")
        expect(ui.page.locator("#list a")).to_have_text(["Other", "First"])
        ui.page.mouse.up()
        expect(ui.panel.locator(".answer")).to_have_text(["One."])


def test_edit_and_regenerate_make_versions_which_stay_reachable(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["Of a fox.", "It ran.", "Of a hen.", "It flew.", "Of a dog."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Of a fox?")
        ui.send("And then?")
        first = ui.panel.locator(".turn").first
        first.get_by_role("button", name="Edit").click()
        field = ui.panel.get_by_label("The question, to be sent again")
        expect(field).to_be_focused()
        field.fill("no")
        field.press("Escape")
        expect(first.get_by_role("button", name="Edit")).to_be_focused()
        first.get_by_role("button", name="Edit").click()
        expect(field).to_have_value("Of a fox?")
        field.fill("Of a hen?")
        field.press("Enter")
        expect(ui.panel.locator(".answer")).to_have_text(["Of a hen."])
        ui.wait_for_state("done")
        ui.send("What then?")
        first.get_by_role("button", name="Regenerate").click()
        expect(ui.panel.locator(".answer")).to_have_text(["Of a dog."])
        expect(first.locator(".which")).to_have_text("3 / 3")
        back = first.get_by_role("button", name="Version before")
        back.click()
        expect(ui.panel.locator(".answer")).to_have_text(["Of a hen.", "It flew."])
        expect(back).to_be_focused()
        ui.page.reload()
        expect(ui.panel.locator(".answer")).to_have_text(["Of a hen.", "It flew."])
        back.click()
        expect(ui.panel.locator(".answer")).to_have_text(["Of a fox.", "It ran."])
        expect(ui.panel.locator(".question")).to_have_text(["Of a fox?", "And then?"])
        expect(first.get_by_role("button", name="Version after")).to_be_focused()
    assert "fox" not in model.prompts[3] and "Of a hen." in model.prompts[3]
    assert "It flew" not in model.prompts[4]


def test_double_click_asks_once_and_another_conversation_may_be_opened_at_once(
    model: Model, open_playground: OpenPlayground
) -> None:
    model.says = ["One.", "Two.", "Three.", "Four."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        begun(ui, "First", "Second")
        ui.of_turn("Regenerate").dblclick()
        expect(ui.turn.locator(".answer")).to_have_text("Three.")
        expect(ui.turn.locator(".which")).to_have_text("2 / 2")
        ui.panel.locator(".composer textarea").fill("And?")
        ui.page.evaluate("""() => {
          document.querySelector("#chat .send").click();
          document.querySelectorAll("#list a")[1].click();
        }""")
        expect(ui.panel.locator(".question")).to_have_text(["First"])
        ui.page.get_by_role("link", name="Second").click()
        expect(ui.panel.locator(".answer")).to_have_text(["Three.", "Four."])
    assert "Second" in model.prompts[3] and "Three." in model.prompts[3]


def test_answer_is_copied_as_it_was_sent(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["**Two** lines\n\n- of Markdown"]
    with served(model) as url, open_playground(url) as ui:
        ui.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ui.open()
        ui.send("Hi")
        ui.of_turn("Copy").click()
        expect(ui.of_turn("Copied")).to_be_visible()
        assert ui.page.evaluate("navigator.clipboard.readText()") == "**Two** lines\n\n- of Markdown"


def test_conversation_is_named_renamed_deleted_and_restored(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["One.", "Two."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        begun(ui, "one two three four five six seven eight", "Second")
        expect(ui.page.locator("#list a")).to_have_text(["Second", "one two three four five six seven"])
        expect(ui.page.locator("#list [aria-current=page]")).to_have_text("Second")
        of_list(ui, "Rename Second").click()
        name = ui.page.get_by_label("Name of the conversation")
        name.fill("Other")
        name.press("Escape")
        expect(of_list(ui, "Rename Second")).to_be_focused()
        of_list(ui, "Rename Second").click()
        name.fill("<b>New name</b>")
        name.press("Enter")
        expect(ui.page.locator("#list a").first).to_have_text("<b>New name</b>")
        of_list(ui, "Delete <b>New name</b>").click()
        expect(ui.page.locator("#list a")).to_have_count(1)
        expect(ui.panel.locator(".log")).to_be_empty()
        of_list(ui, "Undo").click()
        expect(ui.page.locator("#list a").first).to_be_focused()
        ui.page.keyboard.press("Enter")
        expect(ui.turn.locator(".answer")).to_have_text("Two.")
        of_list(ui, "Delete one two").click()
        expect(ui.page.locator("#list a")).to_have_count(1)
        ui.page.reload()
        expect(ui.page.locator("#list a")).to_have_text(["<b>New name</b>"])


def test_search_finds_titles_questions_answers_and_files(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["Apple pie.", "Plums.", "Nothing."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        begun(ui, "First", "Second")
        ui.button("New").click()
        attach(ui, "list.txt", b"red\nCHERRY\n")
        ui.send("Third")
        field = ui.page.get_by_label("Search conversations")
        for word, found in {
            "apple": ["First"],
            "sec": ["Second"],
            "cherry": ["Third"],
            "list.t": ["Third"],
            "zz": [],
        }.items():
            field.fill(word)
            expect(ui.page.locator("#found")).to_have_text(f"{len(found)} of 3 conversations")
            expect(ui.page.locator("#list a")).to_have_text(found)
        field.fill("pie")
        expect(ui.page.locator("#list .place")).to_have_text("Apple pie.")
        field.fill("")
        expect(ui.page.locator("#list a")).to_have_text(["Third", "Second", "First"])


def attach(ui: Playground, name: str, content: bytes) -> None:
    file = FilePayload(name=name, mimeType="application/octet-stream", buffer=content)
    ui.panel.locator(".picker").set_input_files([file])


def test_text_file_goes_into_the_prompt_and_others_are_refused(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["Seen.", "Again."]
    note = "[role=alert].note"
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        attach(ui, "logo.bmp", b"BM\xff\xff\0")
        refused = "logo.bmp is neither text in UTF-8 nor a PNG, JPEG, WebP or GIF picture."
        expect(ui.panel.locator(note)).to_have_text(refused)
        attach(ui, "null.bin", b"a\0b")
        expect(ui.panel.locator(note)).to_contain_text("null.bin is neither text")
        attach(ui, "big.txt", b"x" * 600_000)
        expect(ui.panel.locator(note)).to_have_text("big.txt has 600 kB: files up to 524 kB can be attached.")
        attach(ui, "gone.txt", b"never sent")
        ui.panel.get_by_role("button", name="Remove gone.txt").click()
        expect(ui.button("Attach")).to_be_focused()
        attach(ui, "größe.md", "# Größe\n```\n<b>x</b>\n```".encode())
        expect(ui.panel.locator(".attached")).to_contain_text("größe.md · 26 B")
        ui.page.reload()
        expect(ui.panel.locator(".attached")).to_contain_text("größe.md")
        ui.send("What is in it?")
        expect(ui.panel.locator(".attached")).to_be_hidden()
        ui.page.reload()
        ui.turn.locator(".file summary").click()
        expect(ui.turn.locator(".file pre")).to_have_text("# Größe\n```\n<b>x</b>\n```")
        ui.of_turn("Regenerate").click()
        expect(ui.turn.locator(".answer")).to_have_text("Again.")
    assert len(model.prompts) == 2
    for prompt in model.prompts:
        assert 'File "größe.md":\n````\n# Größe\n```\n<b>x</b>\n```\n````\n\nWhat is in it?' in prompt
        assert "never sent" not in prompt


def exported(ui: Playground) -> Any:
    with ui.page.expect_download() as download:
        of_list(ui, "Export").click()
    return json.loads(Path(download.value.path()).read_text("utf-8"))


def imported(ui: Playground, content: object, name: str = "mine.json") -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    file = FilePayload(name=name, mimeType="application/json", buffer=text.encode())
    ui.page.locator("#imported").set_input_files([file])


def test_export_is_imported_elsewhere_with_all_versions(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["First.", "Better.", "Other."]
    with served(model) as url:
        with open_playground(url) as ui:
            ui.open("?probabilities=1")
            ui.send("One")
            ui.of_turn("Regenerate").click()
            expect(ui.turn.locator(".answer")).to_have_text("Better.")
            ui.wait_for_state("done")
            file = exported(ui)
        assert file["format"] == "sluice-conversations"
        with open_playground(url) as ui:
            ui.open()
            ui.send("Own")
            for said in ("Imported 1 conversation.", "Imported 0 conversations; 1 were here already."):
                imported(ui, file)
                expect(ui.page.locator("#said")).to_have_text(said)
            expect(ui.page.locator("#list a")).to_have_count(2)
            ui.page.get_by_role("link", name="One").click()
            expect(ui.turn.locator(".answer")).to_have_text("Better.")
            assert ui.turn.locator(".token").count() > 0
            ui.of_turn("Version before").click()
            expect(ui.turn.locator(".answer")).to_have_text("First.")
            again = {each["id"]: each for each in exported(ui)["conversations"]}
    (kept,) = file["conversations"]
    for one, other in zip(again[kept["id"]]["turns"], kept["turns"], strict=True):
        ends = one.pop("end"), other.pop("end")
        assert one == other and ends[0]["seed"] == ends[1]["seed"] != ""


def broken(file: Any) -> dict[str, tuple[Any, str]]:
    """Returns files with one fault each, and the page's message about it."""

    def with_turn(**fields: Any) -> Any:
        copy = json.loads(json.dumps(file))
        copy["conversations"][0]["turns"][0].update(fields)
        return copy

    (own,) = file["conversations"][0]["turns"]
    place = "`conversations[0].turns[0]"
    return {
        "text": ("{oh", "it is not JSON"),
        "cut": (json.dumps(file)[:-20], "it is not JSON"),
        "other": ([1], 'it has no "format": "sluice-conversations"'),
        "newer": (file | {"version": 9}, "its version is 9, and this page reads version 1"),
        "no list": (file | {"conversations": 3}, "`conversations` is not an array"),
        "no text": (with_turn(text=None), f"{place}.text` is not a string"),
        "no state": (with_turn(state="odd"), f"{place}.state` is not one of running, done, stopped, failed"),
        "id": (with_turn(id='"] *'), f"{place}.id` is not an id of letters and digits"),
        "orphan": (with_turn(parent="none"), f"{place}.parent` leads to no turn of its conversation"),
        "circle": (with_turn(parent=own["id"]), f"{place}.parent` leads round in a circle"),
        "twice": (file | {"conversations": file["conversations"] * 2}, "two of its conversations have the same id"),
    }


def test_import_of_a_broken_file_says_why_and_changes_nothing(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["First."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("One")
        file = exported(ui)
        for name, (content, said) in broken(file).items():
            imported(ui, content, f"{name}.json")
            expect(ui.page.locator("#said")).to_contain_text(f"{name}.json was not imported: {said}")
            expect(ui.page.locator("#said")).to_contain_text("Nothing has changed.")
        assert exported(ui)["conversations"] == file["conversations"]


def test_two_tabs_keep_each_others_conversations_and_answers(model: Model, open_playground: OpenPlayground) -> None:
    sends_beginning(model, "A long answer", 6)
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Shared", until="running")
        expect(ui.turn.locator(".answer")).to_have_text("A long")
        two = other_tab(ui, url)
        two.open()
        two.page.get_by_role("link", name="Shared").click()
        expect(two.turn.locator(".answer")).to_have_text("A long")
        expect(two.button("Stop")).to_be_enabled()
        assert len(model.prompts) == 1  # the second tab follows the stream of the first tab
        sends_whole(model, "A long answer", "Mine.", "Yours.", "Both.")
        ui.page.close()
        two.wait_for_state("done")
        assert two.answer == "A long answer"
        three = other_tab(two, url)
        three.open()
        begun(three, "Mine?")
        begun(two, "Yours?")
        three.page.get_by_role("link", name="Shared").click()
        two.page.get_by_role("link", name="Shared").click()
        expect(two.panel.locator(".answer")).to_have_text(["A long answer"])
        two.send("Both?")
        expect(three.panel.locator(".answer")).to_have_text(["A long answer", "Both."])
        for tab in (two, three):
            expect(tab.page.locator("#list a")).to_have_text(["Shared", "Yours?", "Mine?"])
        of_list(three, "Delete Shared").click()
        expect(two.panel.locator(".log")).to_be_empty()
        assert not two.watch.errors and not three.watch.errors


def test_stop_in_another_tab_stops_the_answer(model: Model, open_playground: OpenPlayground) -> None:
    sends_beginning(model, "A long answer", 6)
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Shared", until="running")
        two = other_tab(ui, url)
        two.open(f"#{ui.page.url.rpartition('#')[2]}")
        two.button("Stop").click()
        ui.wait_for_state("stopped")
        two.wait_for_state("stopped")


def test_draft_settings_and_system_prompt_survive_a_reload(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["Yes."]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.set_field("top_k", "7")
        ui.set_extra("system", "Be brief.")
        ui.panel.locator(".composer textarea").fill("Half a quest")
        ui.page.reload()
        expect(ui.panel.locator(".composer textarea")).to_have_value("Half a quest")
        expect(ui.panel.locator("[name=system]")).to_have_value("Be brief.")
        expect(ui.settings.locator("[name=top_k]")).to_have_value("7")
        ui.send("Whole?")
        ui.page.reload()
        expect(ui.panel.locator("[name=system]")).to_have_value("Be brief.")
        expect(ui.panel.locator(".composer textarea")).to_have_value("")
    (submitted,) = model.pool.submitted
    assert submitted.sampling.top_k == 7


def test_storage_refused_by_the_browser_is_said_and_questions_are_answered(
    model: Model, open_playground: OpenPlayground
) -> None:
    model.says = ["Yes."]
    with served(model) as url, open_playground(url) as ui:
        ui.page.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('no storage here') }")
        ui.open()
        ui.send("Hi")
        assert ui.answer == "Yes."
        expect(ui.page.locator("#said")).to_contain_text("no storage here")


def test_everything_is_done_by_keyboard(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["One.", "Two.", "Three."]

    def tab_to(name: str) -> None:
        """Presses Tab until the element of that name has the focus."""
        for _ in range(60):
            if ui.page.evaluate(NAME) == name:
                return
            ui.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {name}")

    with served(model) as url, open_playground(url, viewport={"width": 390, "height": 844}) as ui:
        ui.open()
        tab_to("Send")  # the input field
        ui.page.keyboard.type("First")
        ui.page.keyboard.press("Enter")
        ui.wait_for_state("done")
        tab_to("Edit")
        ui.page.keyboard.press("Enter")
        ui.page.keyboard.type(", but better")
        ui.page.keyboard.press("Enter")
        expect(ui.turn.locator(".answer")).to_have_text("Two.")
        ui.wait_for_state("done")
        tab_to("Version before")
        ui.page.keyboard.press("Enter")
        expect(ui.turn.locator(".answer")).to_have_text("One.")
        tab_to("Conversations")
        ui.page.keyboard.press("Enter")
        tab_to("New conversation")
        ui.page.keyboard.press("Enter")
        ui.page.keyboard.type("Second")
        ui.page.keyboard.press("Enter")
        expect(ui.turn.locator(".answer")).to_have_text("Three.")
        ui.wait_for_state("done")
        tab_to("Conversations")
        ui.page.keyboard.press("Enter")
        tab_to("Search conversations")
        ui.page.keyboard.press("Escape")
        expect(ui.page.locator("#history")).not_to_have_attribute("open", "")
        ui.page.keyboard.press("Enter")
        tab_to("First")
        ui.page.keyboard.press("Enter")
        expect(ui.page.locator("#history")).not_to_have_attribute("open", "")
        expect(ui.turn.locator(".question")).to_have_text("First")
        tab_to("Conversations")
        ui.page.keyboard.press("Enter")
        tab_to("Delete First")
        ui.page.keyboard.press("Enter")
        expect(ui.page.get_by_role("link", name="Second")).to_be_focused()
        tab_to("Undo")
        ui.page.keyboard.press("Enter")
        expect(ui.page.locator("#list a")).to_have_text(["Second", "First"])


NAME = """() => {
  const node = document.activeElement;
  return (node.ariaLabel ?? node.labels?.[0]?.textContent ?? node.textContent).trim();
}"""

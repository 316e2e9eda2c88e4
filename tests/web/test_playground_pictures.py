"""Pictures on the page: chosen, dropped, sent, shown, kept, exported, and refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, expect

from frontend.text.tokenizer import Tokenizer
from tests.frontend.speaking import Model
from tests.images import drawn, seeing_checkpoint
from tests.web.playground import Playground
from tests.web.scripted_server import served

pytestmark = pytest.mark.browser

OpenPlayground = Callable[..., Any]
DROP = """([data, name, type]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(data)], name, {type}));
  const panel = document.querySelector(".panel:not([hidden])");
  panel.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""


def png(seed: int) -> bytes:
    file = io.BytesIO()
    drawn(60, 40, seed).save(file, "PNG")
    return file.getvalue()


def attach(ui: Playground, name: str, content: bytes, kind: str = "image/png") -> None:
    ui.panel.locator(".picker").set_input_files([FilePayload(name=name, mimeType=kind, buffer=content)])


def is_loaded(ui: Playground, images: str) -> bool:
    script = "(found) => found.length > 0 && found.every((one) => one.complete && one.naturalWidth === 60)"
    return bool(ui.panel.locator(images).evaluate_all(script))


@pytest.fixture
def seeing(tmp_path: Path) -> Model:
    return Model(Tokenizer.load(seeing_checkpoint("gemma3", tmp_path / "seeing")))


def seen(model: Model) -> list[int]:
    """Returns the number of pictures in each submitted prompt."""
    return [len(one.stream.submit.images or ()) for one in model.pool.submitted]


def test_pictures_are_sent_shown_and_kept(seeing: Model, open_playground: OpenPlayground) -> None:
    seeing.says = ["A square.", "Two.", "Again."]
    with served(seeing) as url:
        with open_playground(url) as ui:
            ui.open()
            attach(ui, "gone.png", png(2))
            ui.panel.get_by_role("button", name="Remove gone.png").click()
            attach(ui, "one.png", png(0))
            expect(ui.panel.locator(".attached img")).to_have_count(1)
            ui.page.reload()  # a draft keeps its pictures
            expect(ui.panel.locator(".attached img")).to_have_count(1)
            ui.send("What is this?")
            expect(ui.panel.locator(".attached img")).to_have_count(0)
            expect(ui.turn.get_by_role("img", name="one.png")).to_be_visible()
            ui.page.evaluate(DROP, [list(png(1)), "two.png", "image/png"])
            expect(ui.panel.locator(".attached")).to_contain_text("two.png")
            ui.send("And this?")
            ui.page.reload()
            expect(ui.panel.locator(".files img")).to_have_count(2)
            assert is_loaded(ui, ".files img")
            ui.of_turn("Regenerate").click()
            expect(ui.turn.locator(".answer")).to_have_text("Again.")
            with ui.page.expect_download() as download:
                ui.page.locator("#export").click()
            file = Path(download.value.path()).read_text("utf-8")
        assert seen(seeing) == [1, 2, 2]
        with open_playground(url) as ui:
            ui.open()
            for text, said in [
                (harmful(file), "is not the data: URL of a picture"),
                (file, "Imported 1 conversation."),
            ]:
                payload = FilePayload(name="mine.json", mimeType="application/json", buffer=text.encode())
                ui.page.locator("#imported").set_input_files([payload])
                expect(ui.page.locator("#said")).to_contain_text(said)
            ui.page.get_by_role("link", name="What is this?").click()
            expect(ui.panel.locator(".files img")).to_have_count(2)
            assert is_loaded(ui, ".files img")


def harmful(file: str) -> str:
    """Returns an export whose pictures would be loaded from elsewhere."""
    content = json.loads(file)
    content["conversations"][0]["turns"][0]["files"][0]["picture"] = "https://elsewhere.example/a.png"
    return json.dumps(content)


def test_pictures_that_cannot_be_sent_are_refused_in_words(
    seeing: Model, model: Model, open_playground: OpenPlayground
) -> None:
    with served(seeing) as url, open_playground(url) as ui:
        ui.open()
        attach(ui, "big.jpg", b"\xff" * (5 * 1024 * 1024 + 1), "image/jpeg")
        expect(ui.panel.locator(".note")).to_have_text("big.jpg has 5.24 MB: pictures up to 5.24 MB can be attached.")
        attach(ui, "broken.png", png(0)[:300])
        ui.watch.expected_statuses = {400}
        ui.send("What is this?", until="failed")
        assert "the image is broken" in ui.error
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        attach(ui, "one.png", png(0))
        ui.watch.expected_statuses = {400}
        ui.send("What is this?", until="failed")
        assert "sees no images, only text" in ui.error

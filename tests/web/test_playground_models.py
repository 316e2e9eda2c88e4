"""The page of a server that loads and fetches models on demand: states, progress, loading, and fetching more."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.server import Server
from tests.e2e.test_library import BASE, FILE, started
from tests.gguf_files import write
from tests.hub_server import Hub

pytestmark = pytest.mark.browser
OpenPlayground = Callable[..., Any]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    data = write("qwen3", tmp_path_factory.mktemp("made"), "Q8_0").file.read_bytes() + bytes(40_000_000)
    (folder / FILE).write_bytes(data)
    with Hub(folder, stated={FILE: hashlib.sha256(data).hexdigest()}).serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, started(hub, tmp_path_factory.mktemp("home"), patch) as server:
        yield server


def row(ui: Any, name: str) -> Any:
    return ui.page.locator("#shelf li").filter(has=ui.page.locator(".name", has_text=name))


def test_models_are_fetched_loaded_and_unloaded_on_the_page(
    server: Server, hub: Hub, open_playground: OpenPlayground
) -> None:
    with open_playground(server.url) as ui:
        ui.open()
        ui.page.locator("#models").click()
        expect(row(ui, "demo").locator(".status")).to_have_text("loaded")
        ui.page.get_by_role("button", name="Unload demo").click()
        expect(row(ui, "demo").locator(".status")).to_have_text("unloaded")
        hub.bytes_per_s = 20_000_000
        form, said = ui.page.locator("#pull"), ui.page.locator("#fetched")
        form.get_by_label("Fetch a model").fill(BASE)
        form.get_by_role("button", name="Fetch", exact=True).click()
        expect(said).to_contain_text(" %")
        form.get_by_role("button", name="Stop").click()
        expect(said).to_have_text("Stopped; fetching it again continues.")
        hub.bytes_per_s = 0
        form.get_by_role("button", name="Fetch", exact=True).click()
        expect(said).to_have_text(f"{BASE} is here.")
        expect(row(ui, BASE).locator(".status")).to_have_text("unloaded")
        ui.page.get_by_role("button", name=f"Load {BASE}").click()
        expect(row(ui, BASE).locator(".status")).to_have_text("loaded")
        form.get_by_label("Fetch a model").fill("org/absent:Q4_0")
        form.get_by_role("button", name="Fetch", exact=True).click()
        expect(said).to_contain_text("org/absent")


def test_a_server_with_one_model_has_no_list(demo: Server, open_playground: OpenPlayground, tmp_path: Path) -> None:
    with open_playground(demo.url) as ui:
        ui.open()
        expect(ui.page.locator("#models")).to_be_hidden()

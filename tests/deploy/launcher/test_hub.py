"""The table distinguishes models on the hub from local models, and a separate process fetches models from the hub."""

from pathlib import Path

import pytest

from deploy.launcher.many_sizes import FetchFailed, HubModels
from tests.hub_server import serving

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": bytes(1 << 20)}


def test_only_hub_ids_without_a_folder_of_that_name_are_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/here").mkdir(parents=True)
    it = HubModels("")
    here = ("demo", "smollm2", "org/here", "/models/x", "./x", "a/b/c", "x.gguf")
    assert [model for model in (*here, "org/x", "org/x:Q4_0") if it.is_away(model)] == ["org/x", "org/x:Q4_0"]
    assert it.path("org/x") == "org/x"


async def test_a_process_fetches_a_model_and_says_why_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        it = HubModels("")
        await it.fetch(hub.name)
        assert not it.is_away(hub.name)
        assert (Path(it.path(hub.name)) / "model.safetensors").stat().st_size == 1 << 20
        with pytest.raises(FetchFailed, match="org/absent"):
            await it.fetch("org/absent")
        assert it.is_away("org/absent")

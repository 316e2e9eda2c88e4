"""The command lines of child processes, and the folder of the model that they share."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from deploy.launcher.child_command import (
    DEMO_MODEL,
    FRONTEND_FLAGS,
    CliError,
    child_environment,
    command_line,
    with_local_model,
    with_tokenizer_files,
)
from shared.config.settings import Settings, with_values
from tests.gguf_files import write
from tests.hub_server import Hub


def of_model(model: str) -> Settings:
    return with_values(Settings(), {"model": model})


def test_command_line_names_the_role_the_parent_and_changed_settings_only() -> None:
    argv = command_line("frontend", with_values(Settings(), {"port": 9, "page_size": 64}), FRONTEND_FLAGS)
    assert argv[0] == sys.executable
    assert argv[-3:] == ["frontend", f"--parent={os.getpid()}", "--port=9"]


def test_child_environment_finds_the_package_and_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", "/other")
    environment = child_environment()
    home = str(Path(__file__).parents[3])
    assert environment["PYTHONPATH"].split(os.pathsep) == [home, "/other"]
    assert "SLUICE_PORT" not in environment


def test_local_model_becomes_a_folder_and_has_its_short_name_and_its_path(tmp_path: Path) -> None:
    demo = with_local_model(of_model("demo")).model
    assert (demo.model, demo.name) == (str(DEMO_MODEL), "demo")
    folder = with_local_model(of_model(str(tmp_path))).model
    assert (folder.model, folder.names) == (str(tmp_path), (tmp_path.name, str(tmp_path)))
    hub = with_local_model(of_model("org/model")).model
    assert (hub.model, hub.name) == ("org/model", "org/model")


def test_model_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "model.bin").touch()
    for model, words in (
        (str(tmp_path / "model.gguf"), "model.gguf is not a GGUF file"),
        (str(tmp_path / "model.bin"), "Python's pickle format, not GGUF"),
        (str(tmp_path / "missing"), "there is no such file or folder"),
        ("a/b/c", "there is no such file or folder"),
        ("missing.gguf", "there is no such file or folder"),
        ("a/missing.gguf", "there is no such file or folder"),
    ):
        with pytest.raises(CliError, match=words) as caught:
            with_local_model(of_model(model))
        assert caught.value.code == 3


def test_tokenizer_files_of_a_folder_are_not_fetched(tmp_path: Path) -> None:
    settings = of_model(str(tmp_path))
    assert with_tokenizer_files(settings) is settings


def test_gguf_file_becomes_its_translation_and_has_its_short_name_and_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write("qwen3", tmp_path).file
    model = with_local_model(of_model(str(path))).model
    assert (Path(model.model) / "tokenizer.json").exists() and model.names == ("model", str(path))
    hub = with_local_model(of_model("org/tiny:folder/name.gguf")).model
    assert (hub.model, hub.name) == ("org/tiny:folder/name.gguf", "org/tiny:folder/name.gguf")


def test_hub_names_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write("qwen3", tmp_path / "repo").file.rename(tmp_path / "repo" / "tiny-Q8_0.gguf")
    shutil.rmtree(tmp_path / "repo" / "reference")
    with Hub(tmp_path / "repo").serving() as hub:
        hub.use(monkeypatch, tmp_path / "hub")
        folder = with_tokenizer_files(of_model(f"{hub.name}:Q8_0")).model.model
        assert (Path(folder) / "tokenizer.json").exists()
        with pytest.raises(CliError, match=r"say which: org/tiny:NAME, where NAME is one of Q8_0$") as caught:
            with_tokenizer_files(of_model(hub.name))
        assert caught.value.code == 3

"""Tests of `sluice fetch`."""

from pathlib import Path

import pytest

from deploy.cli import main
from tests.hub_server import serving

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": bytes(3 << 20), "pytorch_model.bin": b"x"}


def test_fetched_model_is_read_without_a_network_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        assert main.main(["fetch", hub.name]) == 0
        printed = capsys.readouterr().out
        assert hub.downloaded == {"config.json", "tokenizer.json", "model.safetensors"}
    place, size = printed.splitlines()
    assert place.startswith(f"{hub.name} is in ") and size == "its files of weights have 0.00 GiB"
    folder = Path(place.rpartition(" ")[2])
    assert (folder / "model.safetensors").stat().st_size == 3 << 20
    assert main.main(["fetch", hub.name]) == 0, "the hub is gone, but the copy is complete"
    assert capsys.readouterr().out == printed


def test_model_that_is_not_there_ends_in_one_sentence_and_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["fetch", str(tmp_path / "nothing")]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert main.main(["fetch", str(tmp_path)]) == 3, "a folder without weights"
    assert str(tmp_path) in capsys.readouterr().err

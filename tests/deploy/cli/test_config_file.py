"""Tests of `sluice serve --config FILE`: every key is a flag's name, and flags and variables win."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.cli.config_file import add_config, config_text, read_config
from deploy.launcher.child_command import SERVE_FLAGS
from shared.config.declaration import ConfigError
from shared.config.settings import Settings
from tests.deploy.cli.harness import sluice


def written(folder: Path, text: str) -> Path:
    file = folder / "sluice.toml"
    file.write_text(text)
    return file


def served(monkeypatch: pytest.MonkeyPatch, *words: str) -> Settings:
    """Returns the settings with which `sluice serve` would start."""
    seen: list[Settings] = []

    def serve(settings: Settings, namespace: argparse.Namespace) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("deploy.cli.processes.serve", serve)
    assert cli.main(["serve", *words]) == 0
    return seen[0]


def test_flags_and_variables_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'model = "a"\nport = 1\nmax-seq-len = 64\nprefix-cache = false\nkv-cache-gb = 2\napi-key = ["x", "y"]'
    file = written(tmp_path, text)
    monkeypatch.setenv("SLUICE_MAX_SEQ_LEN", "32")
    it = served(monkeypatch, "--config", str(file), "--port", "2")
    assert (it.model.model, it.frontend.port, it.model.max_seq_len) == ("a", 2, 32)
    assert (it.worker.prefix_cache, it.worker.kv_cache_gb, it.frontend.api_key) == (False, 2.0, "x,y")
    assert served(monkeypatch, "b", f"--config={file}").model.model == "b"


def test_every_flag_can_stand_in_the_file(tmp_path: Path) -> None:
    defaults = {item.name: getattr(getattr(Settings(), record.name), item.name)
                for record in fields(Settings) for item in fields(getattr(Settings(), record.name))}  # fmt: skip
    allowed = {name: value for name, value in defaults.items() if name not in SIZES}
    assert read_config(written(tmp_path, config_text(allowed, ["all of them"])), SERVE_FLAGS) == allowed


SIZES = {"prefill_chunk_size", "max_step_tokens", "max_batch_size"}  # their default, 0, is no value for a flag


def test_texts_survive_the_file(tmp_path: Path) -> None:
    for text in ('a "b" \\ ü\n\t\x7f', "'", "日本"):
        assert read_config(written(tmp_path, config_text({"model": text})), SERVE_FLAGS) == {"model": text}


@pytest.mark.parametrize(("text", "words"), [
    ("max-seq-le = 1", "'max-seq-le' is no flag of sluice serve; did you mean max-seq-len?"),
    ("zzzz = 1", "'zzzz' is no flag of sluice serve"),
    ("port = true", "port must be a whole number, not True"),
    ('port = "80"', "port must be a whole number, not '80'"),
    ("port = 1.5", "port must be a whole number, not 1.5"),
    ("port = -1", "port must be at least 0, not '-1'"),
    ("prefix-cache = 1", "prefix-cache must be true or false, not 1"),
    ("model = 1", "model must be a text, not 1"),
    ("model = [1]", "model must be a list of texts"),
    ("host = ['a']", "host must be a text"),
    ("device = 'tpu'", "device must be one of auto, cpu, cuda"),
    ("max-seq-len = 1\nmax_seq_len = 2", "'max_seq_len' stands there twice"),
    ("a = [", "sluice.toml: "),
    ("[worker]\nthreads = 1", "'worker' is no flag"),
    ("api-key = { a = 1 }", "api-key must be a text"),
])  # fmt: skip
def test_mistakes_name_the_file_and_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = written(tmp_path, text)
    code, _, told = sluice(capsys, "serve", "--config", str(file))
    assert code == 2 and f"--config {file}" in told and words in told and told.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        add_config(argparse.Namespace(), tmp_path / "absent.toml", SERVE_FLAGS, {})


def test_only_serve_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = sluice(capsys, "worker", "--config", "x")
    assert code == 2 and "--config" in told

"""Tests of `sluice models`: what lies on the disk, with size and last use, and its removal."""

import hashlib
import os
from pathlib import Path

import pytest

from deploy.cli.stored_models import ago, size_text, stored_models
from deploy.launcher.packaged_model import SMOLLM2
from shared.hf_hub import fetch
from tests.deploy.cli.harness import sluice
from tests.hub_server import serving

GGUFS = {"tiny-Q4_K_M.gguf": bytes(3000), "tiny-Q8_0.gguf": b"8" * 5000, "mmproj-F16.gguf": b"m", "README.md": b"#"}
SAFETENSORS = {"config.json": b"{}", "model.safetensors": bytes(2000)}
DAY = 86400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_each_gguf_file_is_a_model_and_one_can_go(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(GGUFS, tmp_path, monkeypatch) as hub:
        folder = fetch(hub.name, ["*.gguf"])
    assert {(one.name, one.size) for one in stored_models()} == {("org/tiny:Q4_K_M", 3000), ("org/tiny:Q8_0", 5000)}
    blob = (folder / "tiny-Q8_0.gguf").resolve()
    code, out, _ = sluice(capsys, "models", "--rm", "org/tiny:q8_0")
    assert (code, out) == (0, "removed org/tiny:Q8_0: 5 kB are free again\n")
    assert not blob.exists() and (folder / "tiny-Q4_K_M.gguf").is_file()
    assert sluice(capsys, "models", "--rm", "org/tiny:Q4_K_M")[0] == 0
    assert list(cache.glob("models--*")) == [], "the last model takes the folder with it"
    assert "no models are on this machine" in sluice(capsys, "models")[1]


def test_bytes_that_two_models_share_stay_until_the_last_goes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving({"a-Q4_0.gguf": b"same", "b-Q8_0.gguf": b"same"}, tmp_path, monkeypatch) as hub:
        folder = fetch(hub.name, ["*.gguf"])
    assert sluice(capsys, "models", "--rm", "org/tiny:Q4_0")[0] == 0
    assert (folder / "b-Q8_0.gguf").read_bytes() == b"same"


def test_list_has_size_and_last_use_the_last_used_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(SAFETENSORS, tmp_path, monkeypatch) as hub:
        folder = fetch(hub.name, ["*"])
    packaged = tmp_path / "own" / "sluice" / "models" / Path(SMOLLM2.file).name
    packaged.parent.mkdir(parents=True)
    packaged.write_bytes(bytes(4000))
    then = packaged.stat().st_mtime - 2 * DAY - 60
    os.utime(packaged, (then, then))
    lines = sluice(capsys, "models")[1].splitlines()
    assert [line.split(maxsplit=1) for line in lines[:3]] == [
        ["NAME", "SIZE  LAST USE"], ["org/tiny", "2 kB  just now"], ["smollm2", "4 kB  2 days ago"],
    ]  # fmt: skip
    for path in folder.rglob("*"):
        os.utime(path.resolve(), (then - DAY, then - DAY))
    assert [one.name for one in stored_models()] == ["smollm2", "org/tiny"]


def test_fetched_again_is_used_now_even_if_the_disk_notes_no_reading(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({"x-Q4_0.gguf": b"x"}, tmp_path, monkeypatch) as hub:
        hub.stated = {"x-Q4_0.gguf": hashlib.sha256(b"x").hexdigest()}
        blob = (fetch(hub.name, ["*"]) / "x-Q4_0.gguf").resolve()
        modified = blob.stat().st_mtime_ns
        os.utime(blob, ns=(modified - DAY * 10**9, modified))
        fetch(hub.name, ["*"])
    assert blob.stat().st_atime_ns >= modified == blob.stat().st_mtime_ns


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--rm", "nothing"], "--rm nothing: see sluice models"),
        (["--rm", "x", "--url", "http://h"], "does not go with"),
    ],
)
def test_what_cannot_be_removed_is_refused(
    cache: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    code, out, problem = sluice(capsys, "models", *flags)
    assert (code, out) == (2, "") and reason in problem


def test_sizes_and_times_are_for_people() -> None:
    assert [size_text(n) for n in (5, 98_362_432, 4_920_000_000)] == ["5 B", "98 MB", "4.9 GB"]
    assert [ago(0, now) for now in (30, 61, 3 * 3600, 86400)] == [
        "just now",
        "1 minute ago",
        "3 hours ago",
        "1 day ago",
    ]

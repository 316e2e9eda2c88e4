"""Tests of `sluice pull`: names, the lines of progress, resumed downloads, hashes, and what is refused."""

import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import pull as command
from deploy.cli import verdict
from deploy.cli.machine_speed import Speed
from deploy.cli.pull import resolve
from deploy.launcher.child_command import CliError
from shared import hf_hub
from tests.deploy.cli.harness import sluice
from tests.deploy.cli.test_run import forecast_here
from tests.gguf_files import write
from tests.hub_server import Hub, serving


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write("qwen3", tmp_path_factory.mktemp("made"), "Q8_0").file.read_bytes()


@pytest.fixture
def hub(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "measured_speed", lambda: Speed(20.0, 100.0, None))
    monkeypatch.setattr(command, "EVERY_S", 0.0)
    monkeypatch.setattr(verdict, "run_forecast", forecast_here)
    monkeypatch.setattr("shared.gguf.translated.BEGINNING", 100_000)
    monkeypatch.setattr(hf_hub, "PIECE", 1 << 16)
    with serving({"Tiny-Q8_0.gguf": data, "README.md": b"#"}, tmp_path, monkeypatch) as hub:
        hub.stated = {"Tiny-Q8_0.gguf": hashlib.sha256(data).hexdigest()}
        yield hub


def pulled(capsys: pytest.CaptureFixture[str], name: str) -> tuple[int, list[dict[str, Any]], str]:
    code, out, told = sluice(capsys, "pull", "--json", name)
    return code, [json.loads(line) for line in out.splitlines()], told


def test_a_pull_tells_ollamas_lines_in_their_order(hub: Hub, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, told = pulled(capsys, f"hf.co/{hub.name}:latest")
    assert (code, told) == (0, "")
    digest = hub.stated["Tiny-Q8_0.gguf"]
    words = [line["status"] for line in lines]
    assert list(dict.fromkeys(words)) == [
        "pulling manifest", f"pulling {digest[:12]}", "verifying sha256 digest", "writing manifest", "success",
    ]  # fmt: skip
    progress = [line for line in lines if "total" in line]
    assert {(line["digest"], line["total"]) for line in progress} == {(f"sha256:{digest}", len(data))}
    done = [line["completed"] for line in progress]
    assert done == sorted(done) and done[-1] == len(data) and len(done) > 3
    end = lines[-1]
    assert (end["model"], end["flags"]) == ("org/tiny:Q8_0", {}) and Path(end["folder"]).read_bytes() == data


def test_a_pull_that_was_cut_continues(
    hub: Hub, data: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = command._judge("").hub(hub.name).offer.model  # fetches the header
    half = len(data) // 2
    with monkeypatch.context() as patch:
        patch.setattr(hf_hub.time, "sleep", stop)
        hub.cuts = [half]
        with pytest.raises(KeyboardInterrupt):
            command._from_hub(resolved, "", lambda status, **more: None)
    hub.downloads.clear()
    code, lines, _ = pulled(capsys, f"{hub.name}:Q8_0")
    assert code == 0 and Path(lines[-1]["folder"]).read_bytes() == data
    (start,) = [int(one.partition("@")[2]) for one in hub.downloads if one.startswith("Tiny")]
    assert half - (1 << 16) < start <= half, "only the rest was sent"
    first = next(line for line in lines if "total" in line)
    assert start <= first["completed"] and first["total"] == len(data)


def stop(seconds: float) -> None:
    raise KeyboardInterrupt  # as a process that ends


def test_a_wrong_hash_is_told_and_the_file_is_gone(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.stated = {"Tiny-Q8_0.gguf": "0" * 64}
    code, lines, told = pulled(capsys, f"{hub.name}:Q8_0")
    assert code == 3 and "has the SHA-256" in told and "it was deleted; fetch it again" in told
    assert lines[-1]["status"] == "verifying sha256 digest"
    assert not list((hub.folder.parent / "cache").rglob("*.gguf"))


def test_a_gated_repository_is_told_with_its_remedy(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.refusal = (403, "GatedRepo")
    code, lines, told = pulled(capsys, hub.name)
    assert code == 3 and "is gated: accept its terms" in told and lines == [{"status": "pulling manifest"}]


def test_a_disk_without_space_is_told_before_and_during_the_download(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verdict, "free_disk", lambda folder: verdict.SPARE_DISK + 10)
        code, lines, told = pulled(capsys, hub.name)
        assert code == 3 and "does not fit on the disk" in told and len(lines) == 1

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_hub, "_pieces", full)
    code, _, told = pulled(capsys, hub.name)
    assert code == 3 and "the disk is full: 'org/tiny' is fetched only in part" in told


def test_a_full_disk_is_seen_behind_other_errors() -> None:
    error = RuntimeError("odd")
    error.__cause__ = OSError(errno.EDQUOT, "quota")
    assert hf_hub._is_full(error) and not hf_hub._is_full(OSError(errno.EIO, "bad"))


def test_names_mean_models_on_the_hub_and_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "sluice").mkdir()
    (tmp_path / "sluice" / "models.toml").write_text(
        '[names]\n"mine:1b" = { repository = "org/x", choose = "Q4_0", '
        "flags = { max-seq-len = 64, prefix-cache = false } }"
    )
    assert resolve("mine:1b") == ("org/x:Q4_0", {"max-seq-len": "64", "prefix-cache": False})
    assert resolve("https://huggingface.co/org/x:Q4_K_M") == ("org/x:Q4_K_M", {})
    assert resolve("qwen3:4b:latest")[0] == resolve("qwen3:4b")[0] == "Qwen/Qwen3-4B-GGUF"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("")
    for name in ("here", "/etc/passwd", "./here", "../x", "demo", "no-such-name"):
        with pytest.raises(CliError) as refused:
            resolve(name)
        assert refused.value.code == 2, name

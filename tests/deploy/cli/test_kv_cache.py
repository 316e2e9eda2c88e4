"""Tests of deploy/cli/kv_cache.py."""

import os
import zlib
from pathlib import Path

import pytest

from deploy.cli.kv_cache import cache, prefixes
from deploy.launcher.child_command import CliError
from worker.kv_cache.store_file import Disk, Head, packed_head
from worker.kv_cache.store_tier import PAGES, STATE, Tier

SPACE = b"s" * 32


def stored(folder: Path, *digests: bytes, state: bool = False) -> Tier:
    """Writes a chain of files, of 256 tokens each; the last one is a state with `state`."""
    tier = Tier(folder, 1 << 20, SPACE, Disk())
    tier.refresh()
    for number, digest in enumerate(digests, 1):
        data, last = digest * 100, state and number == len(digests)
        parent = digests[number - 2] if number > 1 else b""
        head = Head(SPACE, digest, parent, 256 * number, "fp_1", 8, (0,), last, len(data), zlib.crc32(data))
        assert tier.write(digest, STATE if last else PAGES, tier.token, (packed_head(head), data))
    return tier


def digest(letter: str) -> bytes:
    return letter.encode() * 32


def test_list_names_the_longest_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path / "kv", digest("a"), digest("b"), digest("c"))
    stored(tmp_path / "kv", digest("a"), digest("d"), state=True)
    assert cache(["list", str(tmp_path / "kv")]) == 0
    shown = capsys.readouterr().out
    assert sorted(line.split()[:2] for line in shown.splitlines()[1:3]) == [
        ["636363636363", "768"],
        ["646464646464", "512"],
    ]
    assert "fp_1" in shown and "just now" in shown


def test_exported_prefix_is_found_in_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path / "kv", digest("a"), digest("b"))
    file = tmp_path / "prefix"
    assert cache(["export", str(tmp_path / "kv"), "6262", str(file)]) == 0
    assert file.stat().st_mode & 0o077 == 0
    assert cache(["import", str(tmp_path / "other"), str(file)]) == 0
    assert "512 tokens were added" in capsys.readouterr().out
    other = Tier(tmp_path / "other", 1 << 20, SPACE, Disk())
    other.refresh()
    for letter in "ab":
        found = other.read(digest(letter), PAGES, 256)
        assert found is not None and found[1].tobytes() == digest(letter) * 100
    with pytest.raises(CliError, match="File exists"):
        cache(["export", str(tmp_path / "kv"), "6262", str(file)])


def test_damaged_export_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "kv", digest("a"))
    file = tmp_path / "prefix"
    cache(["export", str(tmp_path / "kv"), "61", str(file)])
    data = bytearray(file.read_bytes())
    data[512 + 300] ^= 1
    file.write_bytes(data)
    with pytest.raises(CliError, match="damaged: corrupted"):
        cache(["import", str(tmp_path / "other"), str(file)])
    file.write_bytes(bytes(10240))
    with pytest.raises(CliError, match="it is empty"):
        cache(["import", str(tmp_path / "other"), str(file)])
    assert not (tmp_path / "other").exists()


def test_damaged_file_is_not_exported(tmp_path: Path) -> None:
    tier = stored(tmp_path / "kv", digest("a"), digest("b"))
    path = tier.path(digest("b"), PAGES)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CliError, match="is corrupted"):
        cache(["export", str(tmp_path / "kv"), "62", str(tmp_path / "file")])
    assert not (tmp_path / "file").exists()


def test_pipe_among_the_files_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = stored(tmp_path / "kv", digest("a"), digest("b"))
    tier.path(digest("b"), PAGES).unlink()
    os.mkfifo(tier.path(digest("b"), PAGES))
    cache(["list", str(tmp_path / "kv")])
    assert "616161616161" in capsys.readouterr().out


def test_pinned_prefix_survives_the_janitor_until_it_is_unpinned(tmp_path: Path) -> None:
    tier = stored(tmp_path / "kv", digest("a"), digest("b"))
    stored(tmp_path / "kv", digest("c"))
    cache(["pin", str(tmp_path / "kv"), "62"])
    tier.limit = 1
    tier.sweep()
    assert [one.name[:2] for one in prefixes(tmp_path / "kv")] == ["62"]
    tier.limit = sum(one.nbytes for prefix in prefixes(tmp_path / "kv") for one in prefix.files) + 3000
    assert not tier.write(digest("e"), PAGES, tier.token, (bytes(3300),)), "pinned files leave no room"
    assert tier.write(digest("e"), PAGES, tier.token, (bytes(2000),))
    tier.limit = 1
    cache(["unpin", str(tmp_path / "kv"), "62"])
    tier.sweep()
    assert prefixes(tmp_path / "kv") == []


def test_prefix_without_its_beginning_is_shown_and_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = stored(tmp_path / "kv", digest("a"), digest("b"))
    tier.path(digest("a"), PAGES).unlink()
    cache(["list", str(tmp_path / "kv")])
    assert "beginning is missing" in capsys.readouterr().out
    with pytest.raises(CliError, match="is missing"):
        cache(["export", str(tmp_path / "kv"), "62", str(tmp_path / "file")])


@pytest.mark.parametrize("words", [["list", "x"], ["pin", "kv"], ["pin", "kv", "00"], ["export", "kv", "61"]])
def test_mistakes_are_named(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "kv", digest("a"))
    with pytest.raises(CliError):
        cache(words)

"""The hashes of weight files are computed once, then kept."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.strangers import give_away
from worker.checkpoint import content_hash
from worker.checkpoint.content_hash import ContentHashes

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_hash, "KEPT_BYTES", 0)


def hashed(*files: Path, kept: Path) -> list[str]:
    return ContentHashes(files, str(kept)).wait()


def written(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(content_hash.hashlib, "file_digest", refuse)


def test_hashes_depend_on_contents_and_not_on_names(tmp_path: Path) -> None:
    one = [written(tmp_path / "one" / name, name.encode()) for name in ("a", "b")]
    other = [written(tmp_path / "other" / f"new{name}", name.encode()) for name in ("b", "a")]
    first = hashed(*one, kept=tmp_path / "kept")
    assert first == hashed(*other, kept=tmp_path / "kept")
    assert sorted(first) == sorted(hashlib.sha256(name).hexdigest() for name in (b"a", b"b"))


def test_hash_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = written(tmp_path / "model"), tmp_path / "kept"
    assert hashed(file, kept=kept) == [SHA256]
    with monkeypatch.context() as patched:
        no_reading(patched)
        assert hashed(file, kept=kept) == [SHA256]
    written(file, b"Weights")
    assert hashed(file, kept=kept) == [hashlib.sha256(b"Weights").hexdigest()]


def test_hash_of_a_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    gone, file = written(tmp_path / "gone"), written(tmp_path / "model")
    hashed(gone, kept=tmp_path)
    gone.unlink()
    hashed(file, kept=tmp_path)
    assert "gone" not in (tmp_path / content_hash.KEPT).read_text()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 1}'])
def test_damaged_file_of_hashes_is_written_again(tmp_path: Path, content: bytes) -> None:
    file = written(tmp_path / "model")
    written(tmp_path / content_hash.KEPT, content)
    assert hashed(file, kept=tmp_path) == [SHA256]
    assert SHA256 in (tmp_path / content_hash.KEPT).read_text()


def test_folder_that_cannot_be_written_costs_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "model")
    assert hashed(file, kept=file / "folder") == [SHA256]
    assert "cannot be kept" in caplog.text


def test_file_of_the_hubs_cache_has_the_hash_that_it_is_named_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reading(monkeypatch)
    blob = written(tmp_path / "blobs" / SHA256, b"any")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert hashed(link, kept=tmp_path) == [SHA256]


def test_missing_file_is_an_error_when_its_hash_is_needed(tmp_path: Path) -> None:
    hashes = ContentHashes([tmp_path / "missing"], str(tmp_path))
    with pytest.raises(FileNotFoundError):
        hashes.wait()


def test_cache_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = written(tmp_path / "model")
    assert ContentHashes([file]).wait() == [SHA256]
    kept = tmp_path / "cache" / "sluice" / content_hash.KEPT
    kept.write_text(kept.read_text().replace(SHA256, "0" * 64))
    assert ContentHashes([file]).wait() == ["0" * 64], "one's own cache is believed"
    give_away(kept.parent, monkeypatch)
    assert ContentHashes([file]).wait() == [SHA256]
    assert "other users can write to it" in caplog.text

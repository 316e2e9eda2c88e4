"""A file of many tensors is written completely or not at all, and a broken file is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from worker.models import weights_cache
from worker.models.weights_cache import BrokenFile, Header

TENSORS = {
    "words": torch.arange(1000, dtype=torch.int64),
    "odd": torch.arange(13, dtype=torch.uint8),
    "half": torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "whole": torch.randn(3, 1, 50, generator=torch.Generator().manual_seed(1)),
    "large": torch.arange(700_000, dtype=torch.int64),
}
FACTS = {"name": "é", "numbers": [0.5, 2.0**-130, 3]}


def write(path: Path, progress: list[tuple[int, int]] | None = None) -> Path:
    seen = [] if progress is None else progress
    weights_cache.write(path, TENSORS, FACTS, lambda done, total: seen.append((done, total)))
    return path


def read(path: Path, progress: list[tuple[int, int]] | None = None) -> tuple[Header, dict[str, Tensor]]:
    seen = [] if progress is None else progress
    with path.open("rb") as file:
        header = weights_cache.read_header(file.fileno())
        return header, weights_cache.read_tensors(file.fileno(), header, lambda done, total: seen.append((done, total)))


@pytest.mark.parametrize("piece", [64, 1 << 20, weights_cache.PIECE_BYTES])
def test_tensors_and_facts_are_read_as_written(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "PIECE_BYTES", piece * 1024)
    header, tensors = read(write(tmp_path / "file"))
    assert header.facts == FACTS and list(tensors) == list(TENSORS)
    stored = load_file(tmp_path / "file")  # as safetensors reads it
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor) and torch.equal(stored[name], tensor)


def test_all_tensors_lie_in_one_piece_of_memory(tmp_path: Path) -> None:
    tensors = read(write(tmp_path / "file"))[1].values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    written: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    read(write(tmp_path / "file", written), seen)
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert seen[0] == (0, total) and seen[-1] == written[-1] == (total, total)
    assert seen == sorted(seen) and written == sorted(written)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    content = write(tmp_path / "file").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, end, 7), *range(end, len(content), len(content) // 50), len(content) - 1]
    unnoticed = []
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 4
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            read(tmp_path / "damaged")
            unnoticed.append(place)
        except BrokenFile:
            pass
    assert unnoticed == []


def test_file_that_becomes_shorter_while_it_is_read_is_broken(tmp_path: Path) -> None:
    write(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as file:
        header = weights_cache.read_header(file.fileno())
        file.truncate(header.begin + 100)
        with pytest.raises(BrokenFile, match="ends early"):
            weights_cache.read_tensors(file.fileno(), header, lambda done, total: None)


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = write(tmp_path / "file").read_bytes()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"] and (tmp_path / "file").read_bytes() == before


def test_only_old_unfinished_files_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / f"a{weights_cache.UNFINISHED}", tmp_path / f"b{weights_cache.UNFINISHED}"
    for file in (old, young):
        file.write_text("")
    os.utime(old, (0, 0))
    write(tmp_path / "file")
    assert young.exists() and not old.exists()

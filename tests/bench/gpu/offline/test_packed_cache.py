"""The error for a precompiled cache that does not fit a machine says why."""

import json
import tarfile
from pathlib import Path

import pytest

from bench.gpu.offline import packed_cache
from bench.gpu.offline.packed_cache import NOTE, misfit, pack


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "triton_key", lambda: "this build")
    (tmp_path / "cache" / "HASH").mkdir(parents=True)
    (tmp_path / "cache" / "HASH" / "kernel.cubin").write_bytes(b"code")
    return tmp_path / "cache"


def test_packed_cache_unpacks_to_the_same_path(folder: Path, tmp_path: Path) -> None:
    archive = pack(folder, [90], 1, 2.0)
    assert misfit(folder) == ""
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "root", filter="data")
    unpacked = tmp_path / "root" / str(folder).lstrip("/")
    assert (unpacked / "HASH" / "kernel.cubin").read_bytes() == b"code"
    assert f"must be at {folder}" in misfit(unpacked)


def test_packed_cache_of_another_triton_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(folder, [90], 1, 2.0)
    monkeypatch.setattr(packed_cache, "triton_key", lambda: "another build")
    assert "compiled by another build of Triton" in misfit(folder)


def test_packed_cache_that_is_not_there_says_how_to_unpack_it(folder: Path) -> None:
    assert misfit(folder).endswith("`tar xzf cache.tar.gz -C /`")
    pack(folder, [80, 90], 7, 2.0)
    assert json.loads((folder / NOTE).read_text())["capabilities"] == [80, 90]

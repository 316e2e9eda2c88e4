"""The files of an adapter: their hash, and folders that are refused because they hold no adapter."""

from pathlib import Path

import pytest

from shared import lora as files
from shared.lora import AdapterError, read_files


def write(folder: Path, config: bytes = b"{}", weights: bytes = b"w") -> str:
    folder.mkdir(exist_ok=True)
    (folder / files.CONFIG).write_bytes(config)
    (folder / files.WEIGHTS).write_bytes(weights)
    return str(folder)


def test_hash_depends_on_both_files_and_on_where_one_ends(tmp_path: Path) -> None:
    contents = [(b"a", b"b"), (b"a", b"c"), (b"c", b"b"), (b"ab", b""), (b"", b"ab")]
    found = [read_files(write(tmp_path / str(i), *content)).sha256 for i, content in enumerate(contents)]
    assert len({*found}) == len(contents) and read_files(write(tmp_path / "again", b"a", b"b")).sha256 == found[0]


def test_folders_that_are_no_adapters_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterError, match="nowhere is not a folder"):
        read_files(str(tmp_path / "nowhere"))
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        read_files(str(tmp_path))
    (tmp_path / files.PICKLED).write_bytes(b"")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle"):
        read_files(str(tmp_path))
    with pytest.raises(AdapterError, match=r"x\.gguf is missing"):
        read_files(str(tmp_path / "x.gguf"))
    folder = write(tmp_path / "large", b"x" * 9)
    monkeypatch.setattr(files, "MAX_CONFIG_BYTES", 8)
    with pytest.raises(AdapterError, match="more than 8 bytes"):
        read_files(folder)


def test_gguf_file_is_all_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "x.GGUF").write_bytes(b"abc")
    found = read_files(str(tmp_path / "x.GGUF"))
    assert found.is_gguf and found.weights == b"abc"
    assert found.sha256 != read_files(write(tmp_path / "a", b"", b"abc")).sha256
    assert not read_files(write(tmp_path / "b.gguf")).is_gguf, "a folder may have any name"

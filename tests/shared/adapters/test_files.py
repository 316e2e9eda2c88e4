"""The two files of an adapter's folder."""

from pathlib import Path

import pytest

from shared.adapters import files
from shared.adapters.files import AdapterError, read_files


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
    folder = write(tmp_path / "large", b"x" * 9)
    monkeypatch.setattr(files, "MAX_CONFIG_BYTES", 8)
    with pytest.raises(AdapterError, match="more than 8 bytes"):
        read_files(folder)

"""The table of models, written by users or found in a folder."""

from pathlib import Path

import pytest

from shared.config.declaration import ConfigError
from shared.model_list import (
    DEEPEST,
    MOST_FILE_BYTES,
    MOST_MODELS,
    Entry,
    checked,
    find_entries,
    read_entries,
    seconds_of,
)


def test_folder_has_checkpoints_and_gguf_files_at_any_allowed_depth(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefgh"[: DEEPEST - 1])
    for folder in (tmp_path / "one", deep / "two", deep / "x" / "too_deep", tmp_path / ".hidden" / "no"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    for name in ("three.gguf", "four-00001-of-00002.gguf", "four-00002-of-00002.gguf", "mmproj-three.gguf", "x.txt"):
        (tmp_path / name).touch()
    found = find_entries(tmp_path)
    assert sorted(entry.name for entry in found) == ["four", "one", "three", "two"]


def test_empty_or_absent_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint folder and no GGUF file"):
        find_entries(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_entries(tmp_path / "absent")


def test_names_are_unique_over_models_and_aliases() -> None:
    with pytest.raises(ConfigError, match="two models are named 'x': m1 and m2"):
        checked([Entry("m1", name="x"), Entry("m2", name="y", aliases=("x",))], "table")
    for name in ("", "a,b", "a\n", "a" * 257):
        with pytest.raises(ConfigError, match="must be printable"):
            checked([Entry("m", name=name)], "table")


def test_table_has_bounds(tmp_path: Path) -> None:
    entries = [Entry("m", name=str(i)) for i in range(MOST_MODELS)]
    assert len(checked(entries, "table")) == MOST_MODELS
    with pytest.raises(ConfigError, match=f"{MOST_MODELS + 1} models"):
        checked([*entries, Entry("m", name="more")], "table")
    with pytest.raises(ConfigError, match="0 models"):
        checked([], "table")
    file = tmp_path / "big.toml"
    file.write_bytes(b"#" * (MOST_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_entries(file)


@pytest.mark.parametrize(("written", "seconds"), [
    ("300", 300), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("500ms", 0.5), ("0", 0), (0, 0), (2.5, 2.5),
    ("-1", float("inf")), (-1, float("inf")), ("-5m", float("inf")),
])  # fmt: skip
def test_durations(written: str | float, seconds: float) -> None:
    assert seconds_of(written) == seconds


@pytest.mark.parametrize("written", ["", "soon", "5 minutes", "1d", "m", "9" * 13, 2e9, float("nan"), "5m3"])
def test_what_is_no_duration_is_refused(written: str | float) -> None:
    with pytest.raises(ValueError, match="must be"):
        seconds_of(written)

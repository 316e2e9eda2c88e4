"""Argument types of flags that are not settings."""

import argparse
from pathlib import Path

import pytest

from shared.config.flags import comma_separated, new_file, positive_float, positive_int


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_positive_float_accepts_numbers_above_zero(text: str, value: float) -> None:
    assert positive_float(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "x", ""])
def test_positive_float_refuses_other_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a number above 0"):
        positive_float(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_positive_int_refuses_other_text(text: str) -> None:
    assert positive_int("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number above 0"):
        positive_int(text)


def test_new_file_needs_a_folder_and_must_not_be_one(tmp_path: Path) -> None:
    assert new_file(str(tmp_path / "report.md")) == tmp_path / "report.md"
    for path in (tmp_path, tmp_path / "missing" / "report.md"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            new_file(str(path))


def test_comma_separated_drops_duplicates_and_names_unknown_words() -> None:
    read = comma_separated(("a", "b"))
    assert read("b,a,b") == ("b", "a")
    for text in ("c", "a,,b", "all", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not one of a, b"):
            read(text)


def test_comma_separated_all_stands_for_every_name() -> None:
    read = comma_separated(("a", "b", "c"), every=("a", "b"))
    assert read("all") == ("a", "b")
    with pytest.raises(argparse.ArgumentTypeError, match="'d' is not one of all, a, b, c"):
        read("d")

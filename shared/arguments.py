"""Argument types for argparse, for flags that are not settings: bad values are rejected before any work is done."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def positive_int(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def new_file(text: str) -> Path:
    """Parses the path of a file to write. The folder of the file must exist, and the path must not be a folder."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: its folder does not exist, or it is a folder itself"
        )
    return path


def comma_separated(known: Collection[str], *, every: Collection[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser of comma-separated names, which drops duplicates.

    every: the names that `all` stands for; if empty, `all` is not accepted.
    """

    def read(text: str) -> tuple[str, ...]:
        if every and text == "all":
            return tuple(every)
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                choices = ["all", *known] if every else known
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return names

    return read

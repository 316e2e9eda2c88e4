"""Kinds of values that a command's own flags take, for argparse: what is wrong is told before any work is done."""

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
    """A file that is to be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder is missing, or it is one itself")
    return path


def comma_separated(known: Collection[str], *, every: Collection[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """Names between commas, each once; where `every` is given, `all` stands for those."""

    def read(text: str) -> tuple[str, ...]:
        if every and text == "all":
            return tuple(every)
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                words = ["all", *known] if every else known
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(words)}")
        return names

    return read

"""A question with its answer, and the helpers that every question family uses."""

import tomllib
from pathlib import Path
from random import Random
from typing import NamedTuple

from deploy.demo.training.facts import NUMBER_WORDS

_WORDINGS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "questions.toml").read_text(encoding="utf-8"))
WORDINGS = {family: tuple(wordings) for family, wordings in _WORDINGS.items()}


class Exchange(NamedTuple):
    question: str
    answer: str


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def number(rng: Random, value: int) -> str:
    return NUMBER_WORDS[value] if value <= 20 and rng.random() < 0.5 else str(value)

"""A fingerprint is short, the same in every process, and different for different facts."""

from dataclasses import dataclass
from typing import Any

import pytest

from shared.build import DIGITS, fingerprint_of


@dataclass(frozen=True)
class Facts:
    name: str
    option: int = 0
    parts: tuple["Facts", ...] = ()


@dataclass(frozen=True)
class NewerFacts(Facts):
    newer: bool = False


def test_fingerprint_is_short_and_the_same_in_every_process() -> None:
    assert fingerprint_of(["a", 1, {"b": 0.5}]) == "fp_ab8e7aebf7663ad5"
    assert len(fingerprint_of(None)) == 3 + DIGITS


def test_option_at_its_default_does_not_change_a_fingerprint() -> None:
    assert fingerprint_of(Facts("a")) == fingerprint_of(NewerFacts("a", newer=False))
    assert fingerprint_of(Facts("a")) != fingerprint_of(NewerFacts("a", newer=True))


def test_order_of_names_does_not_change_a_fingerprint() -> None:
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})


@pytest.mark.parametrize("other", [Facts("b"), Facts("a", 1), Facts("a", parts=(Facts("c"),)), ["a"], "a"])
def test_other_facts_have_another_fingerprint(other: Any) -> None:
    assert fingerprint_of(other) != fingerprint_of(Facts("a"))

"""The problems with values of settings, in words."""

from typing import Any

import pytest

from shared.config.declaration import setting, value_problem


@pytest.mark.parametrize(
    ("bounds", "value", "problem"),
    [
        ({"at_least": 1}, 1, ""),
        ({"at_least": 1}, 0, "must be at least 1"),
        ({"above": 0}, 0.0, "must be above 0"),
        ({"at_most": 1}, 1.5, "must be at most 1"),
        ({"choices": ("a", "b")}, "c", "must be one of a, b"),
        ({"choices": ("a", "b"), "many": True}, "b,a", ""),
        ({"choices": ("a", "b"), "many": True}, "a, c", "must be one of a, b"),
        ({}, float("nan"), "must be a finite number"),
        ({}, float("inf"), "must be a finite number"),
    ],
)
def test_value_problem_names_the_violated_bound(bounds: dict[str, Any], value: Any, problem: str) -> None:
    assert value_problem(setting(0, "help", **bounds), value) == problem

"""The sample of `make test` is the same in all processes of a run, and covers all tests in the course of days."""

from pathlib import Path

import pytest

from tests.sampling import CASES, TESTS, left_out

NAMES = [f"tests/a/test_b.py::test_c[{case}]" for case in range(9)] + [
    "tests/a/test_b.py::test_d",
    "tests/test_e.py::test_f",
]


def kept(day: str, cases: dict[str, int], tests: dict[str, int]) -> list[str]:
    out = left_out(NAMES, day, cases, tests)
    return [name for name in NAMES if name not in out]


def test_sample_keeps_as_many_cases_of_a_function_as_its_table_says() -> None:
    names = kept("monday", {"tests/a": 2}, {})
    assert len(names) == 4 and names[2:] == NAMES[-2:]


def test_sample_the_longest_row_decides() -> None:
    assert len(kept("monday", {"tests/a": 2, "tests/a/test_b.py": 3}, {})) == 5


def test_sample_of_tests_counts_all_functions_of_a_file() -> None:
    assert len(kept("monday", {"tests/a": 2}, {"tests/a/test_b.py": 1})) == 2
    assert kept("monday", {}, {"tests/a/test_b.py": 0}) == NAMES[-1:]


def test_sample_is_the_same_in_any_order_of_collection() -> None:
    assert left_out(NAMES, "monday", {"tests": 3}, {}) == left_out(NAMES[::-1], "monday", {"tests": 3}, {})


def test_samples_of_many_days_together_leave_nothing_out() -> None:
    assert set().union(*(kept(str(day), {"tests/a": 2}, {}) for day in range(60))) == set(NAMES)


@pytest.mark.parametrize("row", sorted({*CASES, *TESTS}))
def test_row_names_what_exists(row: str) -> None:
    path, _, function = row.partition("::")
    place = Path(__file__).parent.parent / path
    assert place.exists() and (not function or f"def {function}(" in place.read_text())

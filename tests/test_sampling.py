"""The sample of `make test` is the same in all processes of a run, and covers all tests in the course of days."""

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from tests.conftest import limit_examples
from tests.sampling import CASES, EXAMPLES, FILES, TESTS, TURNS, left_out, of_other_days, unread

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


def test_tests_that_take_turns_run_one_a_day_and_each_on_its_day() -> None:
    turns = (
        ("tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_c[2]", "tests/a/test_b.py::test_d"),
        ("tests/x",),
    )
    days = [date(2026, 11, 29) + timedelta(day) for day in range(3)]
    out = [of_other_days(NAMES, day, turns) for day in days]
    assert [len(names) for names in out] == [2, 2, 2] and not set.intersection(*out)
    assert set.union(*out) == {*turns[0]}


def test_sample_reads_as_many_files_of_a_folder_as_its_table_says(tmp_path: Path) -> None:
    for name in ("a/test_1.py", "a/test_2.py", "a/b/test_3.py", "a/helper.py", "test_4.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    rows = {"a": 1, "a/test_2.py": 1}
    days = [unread(tmp_path, str(day), rows) for day in range(20)]
    assert {frozenset(day) for day in days} == {
        frozenset({tmp_path / "a/test_1.py"}),
        frozenset({tmp_path / "a/b/test_3.py"}),
    }


def test_sample_gives_hypothesis_fewer_examples() -> None:
    """The settings of a test are changed from outside, by an attribute which Hypothesis may rename."""
    drawn: list[int] = []

    @settings(max_examples=60, database=None)
    @given(strategies.integers())
    def many(number: int) -> None:
        drawn.append(number)

    limit_examples(many)
    many()
    assert 0 < len(drawn) <= EXAMPLES


@pytest.mark.parametrize("row", sorted({*CASES, *FILES, *TESTS}.union(*TURNS)))
def test_row_names_what_exists(row: str) -> None:
    path, _, function = row.partition("[")[0].partition("::")
    place = Path(__file__).parent.parent / path
    assert place.exists() and (not function or f"def {function}(" in place.read_text())

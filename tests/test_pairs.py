import math
from itertools import combinations, product

import pytest

from tests.pairs import in_pairs, pairs


@pytest.mark.parametrize("sizes", [(2, 2), (1, 7), (8, 3, 5), (3, 3, 3, 3), (4, 2, 8, 2), (1, 1, 1), (2, 9, 6, 2, 1)])
def test_every_pair_of_values_is_in_a_case_and_there_are_few(sizes: tuple[int, ...]) -> None:
    parameters = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    cases = pairs(*parameters)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(parameters[one], parameters[other]))
    least = math.prod(sorted(sizes)[-2:])
    assert least <= len(cases) == len(set(cases)) <= 1.4 * least
    assert cases == pairs(*parameters), "processes that share the tests must agree about them"


def test_a_parameter_without_values_leaves_no_case() -> None:
    assert pairs([1, 2], [], [3]) == []


def test_values_that_vary_together_stay_together() -> None:
    mark = in_pairs({"a, b": [(1, 2), (3, 4)], "c": iter("xyz"), "d": [None]}, indirect=["a"])
    names, cases = mark.mark.args
    assert names == "a, b, c, d" and mark.mark.kwargs["indirect"] == ["a"]
    assert sorted(map(tuple, cases)) == [(a, a + 1, c, None) for a in (1, 3) for c in "xyz"]

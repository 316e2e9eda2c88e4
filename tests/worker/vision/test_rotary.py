"""The three positions of M-RoPE, for any part of a prompt, agree with the rule written token by token."""

import random

from worker.vision.attention import RotaryPositions, components


def one_by_one(length: int, starts: list[int], squares: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    following = 0
    images = dict(zip(starts, squares, strict=True))
    while len(found) < length:
        if len(found) in images:
            rows, columns = images[len(found)]
            found += [
                (following, following + row, following + column) for row in range(rows) for column in range(columns)
            ]
            following += max(rows, columns)
        else:
            found.append((following,) * 3)
            following += 1
    return found[:length]


def test_positions_of_every_part_of_a_prompt() -> None:
    draw = random.Random(0)
    for _ in range(60):
        starts: list[int] = []
        squares: list[tuple[int, int]] = []
        at = 0
        for _ in range(draw.randrange(4)):
            at += draw.choice((0, 1, 5))
            starts.append(at)
            squares.append((draw.randrange(1, 5), draw.randrange(1, 5)))
            at += squares[-1][0] * squares[-1][1]
        length = at + 9
        expected, positions = one_by_one(length, starts, squares), RotaryPositions(starts, squares)
        assert list(map(tuple, positions.between(0, length).T.tolist())) == expected
        for _ in range(20):
            begin = draw.randrange(length)
            end = draw.randrange(begin + 1, length + 1)
            assert list(map(tuple, positions.between(begin, end).T.tolist())) == expected[begin:end]
        assert max(map(max, expected)) < length, "tables for all positions of a sequence suffice"


def test_pairs_of_a_section_stand_together_where_they_do_not_alternate() -> None:
    assert components((1, 2, 1), 8, alternate=False) == [0, 1, 1, 2] * 2
    assert components((16, 24, 24), 128, alternate=False)[:64] == [0] * 16 + [1] * 24 + [2] * 24
    assert components((1, 2, 3), 6, alternate=False) == [0, 1, 1] * 2, "more pairs than the table has"
    assert components((1, 1, 1), 10, alternate=False) == [0, 1, 2, 0, 0] * 2, "pairs that do not rotate"


def test_pairs_alternate_between_the_positions_as_far_as_their_sections_reach() -> None:
    assert components((2, 1, 1), 8) == [0, 1, 2, 0] * 2
    assert components((2, 1, 1), 12) == [0, 1, 2, 0, 0, 0] * 2, "pairs that do not rotate"
    assert components((24, 20, 20), 128)[:64] == [0, 1, 2] * 20 + [0] * 4
    assert components((11, 11, 10), 64)[:32] == [*([0, 1, 2] * 10), 0, 1]

"""The processors that a rank gets, by the NUMA nodes that the system lists."""

from pathlib import Path

import pytest

from worker.distributed.leader import nodes, processors_of

TWO = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
FOUR = {node: {2 * node, 2 * node + 1} for node in range(4)}


@pytest.mark.parametrize(
    ("by_node", "allowed", "expected"),
    [
        ({}, {0, 1}, [set(), set()]),
        ({0: {0, 1}}, {0, 1}, [set(), set()]),
        (TWO, set(range(8)), [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (TWO, {0, 1, 4}, [set(), set()]),
        (TWO, {0, 2}, [{0}, {2}]),
        (TWO, set(range(8)), [{0, 1, 4, 5}, {0, 1, 4, 5}, {2, 3, 6, 7}, {2, 3, 6, 7}]),
        (FOUR, set(range(8)), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
    ],
)
def test_ranks_are_dealt_out_to_nodes(
    by_node: dict[int, set[int]], allowed: set[int], expected: list[set[int]]
) -> None:
    count = len(expected)
    assert [processors_of(rank, count, by_node, allowed) for rank in range(count)] == expected


def test_nodes_are_read_as_linux_lists_them(tmp_path: Path) -> None:
    for node, text in {"node0": "0-2,8\n", "node1": "3-3\n", "node2": "\n", "node_x": "9"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    assert nodes(tmp_path) == {0: {0, 1, 2, 8}, 1: {3}, 2: set()}
    assert nodes(tmp_path / "none") == {}

"""Keeps a rank on the processors of one NUMA node, so that its memory is near. Does nothing if there is one node."""

import os
from collections.abc import Mapping, Set
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def stay_on_node(rank: int, count: int) -> None:
    """Keeps this process, and the threads that it starts later, on the node of its rank."""
    if mine := processors_of(rank, count, nodes(), os.sched_getaffinity(0)):
        os.sched_setaffinity(0, mine)


def processors_of(rank: int, count: int, by_node: Mapping[int, Set[int]], allowed: Set[int]) -> Set[int]:
    """Returns the processors of a rank; an empty set if the rank should not be restricted.

    Ranks are assigned to the nodes in order. If there are fewer ranks than nodes, a rank gets several nodes.
    """
    usable = [mine for _, of_node in sorted(by_node.items()) if (mine := of_node & allowed)]
    if len(usable) < 2:
        return set()
    first, end = rank * len(usable) // count, (rank + 1) * len(usable) // count
    return set().union(*usable[first : max(end, first + 1)])


def nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Returns the processors of each NUMA node, as Linux lists them; empty if Linux lists no nodes."""
    lists = {int(path.name.removeprefix("node")): path / "cpulist" for path in folder.glob("node[0-9]*")}
    return {node: _numbers(path.read_text()) for node, path in lists.items() if path.exists()}


def _numbers(text: str) -> set[int]:
    """Parses a list of ranges: "0-3,8" gives {0, 1, 2, 3, 8}."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}

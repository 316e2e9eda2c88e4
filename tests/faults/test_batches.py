"""A short run of `python -m tests.faults --batch`: a batch has the output of an undisturbed one, whatever dies."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.batches import WAYS, BatchRow, by_route, disturbed, plan, write_input
from tests.faults.server import ServerUnderTest, running

LINES, TOKENS = 120, 16
KILLS = {
    WAYS[0]: ("frontend-killed", "worker-killed", "both-killed", "host-restarted"),
    WAYS[1]: ("command-killed", "both-killed"),
}


@dataclass(frozen=True)
class BatchBench:
    server: ServerUnderTest
    source: Path
    expected: list[str]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchBench]:
    source = write_input(tmp_path_factory.mktemp("batch") / "lines.jsonl", LINES, TOKENS)
    with running(plan()) as server:
        yield BatchBench(server, source, asyncio.run(by_route(server, source)))


@pytest.mark.parametrize("way", WAYS)
def test_kills_at_random_lines_change_no_byte_of_the_output(bench: BatchBench, way: str) -> None:
    row = asyncio.run(disturbed(way, bench.server, bench.source, bench.expected, KILLS[way], 11))
    assert row.good and row.identical == LINES, row.notes
    assert sum(row.killed.values()) == len(KILLS[way])


def test_row_counts_what_is_not_as_it_should_be() -> None:
    def output(*answers: tuple[int, str]) -> list[str]:
        bodies = [{"id": str(place), "created": place, "text": text} for place, (_, text) in enumerate(answers)]
        return [
            json.dumps({"custom_id": f"id-{id}", "error": None, "response": {"status_code": 200, "body": body}})
            for (id, _), body in zip(answers, bodies, strict=True)
        ]

    expected = output((0, "a"), (1, "b"), (2, "c"), (3, "d"))
    row = BatchRow("any", 4)
    row.judge(output((9, ""), (0, "a"), (1, "b"), (2, "c"), (3, "d"))[1:], expected)
    assert row.good
    row = BatchRow("any", 4)
    row.judge(output((0, "a"), (2, "other"), (1, "b"), (1, "b")), expected)
    assert (row.identical, row.lost, row.doubled, row.wrong) == (2, 1, 1, 1) and not row.good and len(row.notes) == 4

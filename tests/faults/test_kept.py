"""A short run of `python -m tests.faults --kept`: every kind of kept answer through two of its faults."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.faults.kept import FAULTS, KeptRow, disturbed, plain_folder, table, write_model
from tests.faults.kept_clients import FORMS, KINDS, Asked, Received, all_asked, undisturbed
from tests.faults.server import ServerUnderTest, running


@dataclass(frozen=True)
class KeptBench:
    server: ServerUnderTest
    asked: list[Asked]
    expected: dict[Asked, Any]


@contextmanager
def store(kind: str) -> Iterator[Callable[[Path], dict[str, str]]]:
    """Yields what names the store of a server."""
    if kind == "sqlite":
        yield plain_folder
        return
    if problem := postgres.missing():
        pytest.skip(problem)
    with postgres.postgres() as server:
        url = server.emptied()
        yield lambda home: {"SLUICE_STORE": url}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptBench]:
    model, asked = write_model(tmp_path_factory.mktemp("model")), all_asked(1, 30)
    with (
        store(request.param) as prepare,
        running(model.plan(replace(FAULTS["both-killed"], prepare=prepare))) as server,
    ):
        yield KeptBench(server, asked, asyncio.run(undisturbed(server.url, asked)))


@pytest.mark.parametrize("name", ["clients-gone", "both-killed"])
def test_no_kept_answer_is_lost_doubled_or_wrong(bench: KeptBench, name: str) -> None:
    rows = asyncio.run(disturbed(name, bench.server, bench.asked, bench.expected, name))
    assert not [note for row in rows for note in row.notes]
    assert [row.form for row in rows] == list(FORMS)
    assert sum(sum(row.identical.values()) for row in rows) == len(bench.asked) == len(FORMS) * len(KINDS) - 1


def test_answers_differ_by_request(bench: KeptBench) -> None:
    texts = {one: bench.expected[one][0] for one in bench.asked if one.form == "stream"}
    assert len({str(text) for text in texts.values()}) == len(KINDS) and all(texts.values())


def test_row_counts_what_is_not_as_it_should_be() -> None:
    row, one = KeptRow("any", "stream"), Asked("stream", "plain", 0, 1)
    for received in (Received("whole", "a"), Received("whole", "b"), Received("error"), Received("lost")):
        row.judge(one, received, "a", damages=False)
    row.judge(one, Received("error"), "a", damages=True)
    row.judge(one, Received("whole", "a", doubled="2 lines"), "a", damages=False)
    assert (row.identical["plain"], row.errors, row.lost, row.wrong, row.doubled) == (2, 1, 2, 1, 1)
    assert not row.good and "| any | stream | 2 of 6 |" in table([row])

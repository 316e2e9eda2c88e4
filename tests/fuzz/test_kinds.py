"""Fuzzes a server for a few seconds with each kind of input. `python -m tests.fuzz MINUTES` is the long run.

One seed is always the same. The other seed is the date, so that the tests meet new inputs; failures name the seed and
the file with the input.
"""

import datetime
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.fuzz.fuzzer import Failure, Fuzzer, Input
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.replies import Unfinished, replies
from tests.fuzz.watch import Watch, watching

SECONDS = {"1": 2.0, f"day {datetime.date.today()}": 1.0}
NAMED = {"ids": lambda kind: kind.name.replace(" ", "-")}


@pytest.fixture(scope="module")
def watch(demo: Server) -> Iterator[Watch]:
    with watching(demo) as watch:
        yield watch
    demo.until_idle()


@pytest.mark.parametrize("kind", KINDS, **NAMED)
def test_server_fuzzed_for_seconds_survives(kind: Kind, watch: Watch, tmp_path: Path) -> None:
    for seed, seconds in SECONDS.items():
        counts = kind.fuzzer(seed, seconds, watch, tmp_path)
        said = [file.read_text()[:2000] for file in counts.files]
        assert counts.inputs and not counts.found, f"seed {seed!r}: {counts} {said}"


@pytest.mark.parametrize("kind", KINDS, **NAMED)
def test_inputs_of_a_seed_are_the_same(kind: Kind) -> None:
    first, again, other = (
        [kind.fuzzer.make(random.Random(f"{seed}/{number}")) for number in range(20)] for seed in ("a", "a", "b")
    )
    assert first == again and first != other


def test_failing_input_is_written_and_replayed(watch: Watch, tmp_path: Path) -> None:
    def attempt(input: Input) -> None:
        if input["number"] > 0.5:
            raise Failure("too large")

    fuzzer = Fuzzer("numbers", lambda rng: {"number": rng.random()}, lambda watch: nullcontext(attempt))
    counts = fuzzer("1", 0.05, watch, tmp_path)
    assert 0 < counts.failures < counts.inputs and len(counts.files) == counts.failures
    assert fuzzer.replay({"number": 0.7}, watch) == ("failures", "too large")
    assert fuzzer.replay({"number": 0.3}, watch) is None


def test_replies_are_read_strictly() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    assert [reply.body for reply in replies(whole + chunks + whole)] == [b"ab"] * 3
    for part in (whole[:-1], chunks[:-2], whole[:10]):
        with pytest.raises(Unfinished):
            replies(part)
    for bad in (b"HTTP/1.1 2000 OK\r\n\r\n", b"x\r\n\r\n", b"HTTP/1.1 200 OK\r\na b\r\n\r\n"):
        with pytest.raises(ValueError):
            replies(bad)

"""How the client of bench/ranks/faults.py reads a stream."""

import time
from collections.abc import Iterator

from bench.ranks.faults import Seen, read

PAUSE_S = 0.05


def stream(*kinds: str) -> Iterator[str]:
    for number, kind in enumerate(kinds):
        if kind == "pause":
            time.sleep(PAUSE_S)
            continue
        yield f"event: {kind}"
        yield f'data: {{"token_id": {number}}}'
        yield ""


def test_ids_and_the_longest_pause_are_read() -> None:
    seen = Seen()
    assert read(stream("token", "token", "pause", "token", "done"), seen) == [0, 1, 3]
    assert len(seen.pauses) == 1 and seen.pauses[0] >= PAUSE_S and not seen.lost


def test_stream_that_ends_with_an_error_is_lost() -> None:
    seen = Seen()
    assert read(stream("token", "error"), seen) == [0]
    assert len(seen.lost) == 1

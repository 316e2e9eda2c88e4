"""Tests of frontend/workers/stream.py."""

import asyncio
from collections.abc import Iterator

import pytest

from frontend.workers.stream import RESYNC_INTERVAL_S, Stream
from shared.messages import End, Logprobs, Outcome, Sampling, Submit
from shared.wire import pack_f32, pack_u32, unpack_f32, unpack_u32


@pytest.fixture
def stream() -> Iterator[Stream]:
    loop = asyncio.new_event_loop()
    yield Stream(Submit(1, pack_u32([5, 6]), Sampling(20), deadline_ms=10_000), loop.create_future())
    loop.close()


def test_tokens_continue_the_output_and_duplicates_are_dropped(stream: Stream) -> None:
    assert stream.add_tokens(0, [1, 2]) and stream.add_tokens(1, [2, 3]) and stream.add_tokens(0, [1])
    assert stream.output == [1, 2, 3]


def test_tokens_after_a_gap_are_ignored(stream: Stream) -> None:
    assert not stream.add_tokens(1, [2])
    assert stream.output == [] and not stream.fresh


def test_gather_returns_what_arrived_since_the_last_call(stream: Stream) -> None:
    stream.add_tokens(0, [1, 2])
    assert (stream.gather().tokens, stream.fresh) == ([1, 2], False)
    stream.add_tokens(2, [3])
    stream.finish(End(1, Outcome.LENGTH, 3))
    batch = stream.gather()
    assert (batch.start, batch.tokens, batch.end) == (2, [3], End(1, Outcome.LENGTH, 3))


def test_callback_is_called_for_every_arrival(stream: Stream) -> None:
    calls: list[int] = []
    stream.on_fresh = lambda: calls.append(len(stream.output))
    stream.add_tokens(0, [1])
    stream.add_tokens(0, [1])  # a duplicate
    stream.finish(End(1, Outcome.LENGTH, 1))
    stream.finish(End(1, Outcome.ERROR, 1))  # ignored, because the stream has ended already
    assert calls == [1, 1] and stream.end == End(1, Outcome.LENGTH, 1)


def test_overlapping_logprobs_are_cut_to_what_is_new(stream: Stream) -> None:
    def logprobs(start: int, values: list[float]) -> Logprobs:
        return Logprobs(1, start, pack_f32(values), 1, pack_u32(range(len(values))), pack_f32(values))

    stream.add_logprobs(logprobs(0, [-1.0, -2.0]))
    stream.add_logprobs(logprobs(1, [-2.0, -3.0]))
    stream.add_logprobs(logprobs(5, [-9.0]))  # log-probabilities after a gap
    first, second = stream.gather().logprobs
    assert (first.start, list(unpack_f32(first.chosen))) == (0, [-1.0, -2.0])
    assert (second.start, list(unpack_f32(second.chosen)), list(unpack_u32(second.top_ids))) == (2, [-3.0], [1])


def test_resubmit_continues_after_the_output_with_the_seed_of_the_admission(stream: Stream) -> None:
    stream.admitted(7, "fp")
    stream.add_tokens(0, [1, 2])
    stream.submitted_at -= 4.0
    stream.resubmit(9)
    submit = stream.submit
    assert (submit.id, submit.original_id, submit.sampling.seed) == (9, 1, 7)
    assert list(unpack_u32(submit.generated)) == [1, 2] and 1_000 < submit.deadline_ms <= 6_000
    assert not stream.acknowledged
    stream.resubmit(10)
    assert stream.submit.original_id == 1


def test_lost_workers_count_only_if_they_admitted_the_stream_and_since_its_last_token(stream: Stream) -> None:
    stream.lost_worker(("a", 1))
    assert not stream.deaths
    stream.admitted(0, "fp")
    stream.lost_worker(("a", 1))
    stream.lost_worker(("b", 1))
    assert stream.deaths == {("a", 1), ("b", 1)}
    stream.add_tokens(0, [1])
    stream.lost_worker(("a", 2))
    assert stream.deaths == {("a", 2)}


def test_resyncs_are_limited_to_one_an_interval(stream: Stream) -> None:
    times = (100.0, 100.0 + RESYNC_INTERVAL_S / 2, 100.1 + RESYNC_INTERVAL_S)
    assert [stream.may_resync(now) for now in times] == [True, False, True]

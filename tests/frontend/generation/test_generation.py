"""A generation: notifications, polls, failures and its end."""

import asyncio

import pytest

from frontend.errors import DeadlineExceeded, Internal, Overloaded, SluiceError, Unprocessable
from frontend.request import Finish
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from tests.fakes import FakePool, sending
from tests.frontend.generation.harness import collect, encode, generation_request, make_service


async def test_deltas_after_several_arrivals_are_one_delta(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(generation_request())
    stream = pool.submitted[0].stream
    deltas = generation.deltas()
    for id in encode(tokenizer)("abc"):
        pool.send_tokens(stream, [id])
    assert [delta.text for delta in await anext(deltas)] == ["abc"]
    pool.send_tokens(stream, encode(tokenizer)("d"))
    pool.end(stream, Outcome.LENGTH)
    (last,) = await anext(deltas)
    assert (last.text, last.finish) == ("d", Finish.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)


async def test_poll_with_a_stop_string_ends_the_choice_and_aborts_its_stream(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool()
    service = make_service(tokenizer, pool)
    generation = await service.start(generation_request(stops=("END",)))
    stream = pool.submitted[0].stream
    pool.send_tokens(stream, ids("some E"))
    deltas = generation.deltas()
    assert (await anext(deltas))[0].text == "some "
    pool.send_tokens(stream, ids("NDless"))
    (last,) = await anext(deltas)
    assert pool.aborted == [stream.id]
    assert (last.text, last.finish, last.stop, last.matched_stop) == ("", Finish.STOP, "END", "END")
    assert last.usage is not None and last.usage.completion_tokens == len(ids("some END"))
    assert await anext(deltas, None) is None
    assert service.generations == set()
    assert service.metrics.aborts == ["stop"] and service.metrics.finishes == [Finish.STOP]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("outcome", "kind", "status"),
    [
        (Outcome.ERROR, Internal, 500),
        (Outcome.DEAD_END, Unprocessable, 422),
        (Outcome.ABORTED, Internal, 500),
        (Outcome.DEADLINE, DeadlineExceeded, 504),
        (Outcome.SHUTDOWN, Overloaded, 503),
    ],
)
async def test_deltas_of_a_failed_stream_raise_after_its_last_tokens(
    tokenizer: Tokenizer, outcome: Outcome, kind: type[SluiceError], status: int
) -> None:
    pool = FakePool(sending(encode(tokenizer)("half"), outcome=outcome, error="because"))
    deltas = (await make_service(tokenizer, pool).start(generation_request())).deltas()
    (delta,) = await anext(deltas)
    assert (delta.text, delta.finish) == ("half", None)
    with pytest.raises(kind, match="because") as failure:
        await anext(deltas)
    assert failure.value.status == status


async def test_deltas_closed_early_abort_all_streams(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    service = make_service(tokenizer, pool)
    generation = await service.start(generation_request(n=3))
    deltas = generation.deltas()
    pool.send_tokens(pool.submitted[0].stream, [65])
    await anext(deltas)
    await deltas.aclose()
    assert sorted(pool.aborted) == [1, 2, 3]
    assert service.metrics.aborts == ["client"] * 3 and service.generations == set()  # type: ignore[attr-defined]


async def test_close_without_a_poll_aborts_once(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(generation_request())
    generation.close()
    generation.close()
    assert pool.aborted == [1]


async def test_deltas_with_one_failed_choice_raise_and_abort_the_others(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(generation_request(n=2))
    pool.end(pool.submitted[1].stream, Outcome.ERROR, "broken")
    with pytest.raises(Internal, match="broken"):
        await collect(generation)
    assert pool.aborted == [1]


async def test_poll_sets_ended_and_error_with_the_last_deltas(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    service = make_service(tokenizer, pool)
    generation = await service.start(generation_request())
    stream = pool.submitted[0].stream
    assert generation.poll() == [] and not generation.ended
    pool.send_tokens(stream, encode(tokenizer)("half"))
    pool.end(stream, Outcome.ERROR, "broken")
    assert [delta.text for delta in generation.poll()] == ["half"]
    assert generation.ended and isinstance(generation.error, Internal) and service.generations == set()


async def test_on_ready_notifies_once_in_a_turn_of_the_loop(tokenizer: Tokenizer) -> None:
    pool, calls = FakePool(), list[int]()
    generation = await make_service(tokenizer, pool).start(generation_request(n=2))
    generation.on_ready(lambda: calls.append(len(calls)))
    await asyncio.sleep(0)
    for submitted in pool.submitted:
        for id in encode(tokenizer)("abc"):
            pool.send_tokens(submitted.stream, [id])
    assert len(calls) == 1, "the first one, before anything arrives"
    await asyncio.sleep(0)
    assert len(calls) == 2
    generation.close()

"""Usage and times while a stream runs."""

from frontend.request import ResponseOptions, Telemetry
from frontend.text.tokenizer import Tokenizer
from shared.messages import Timings
from tests.fakes import FakePool
from tests.frontend.generation.harness import generation_request, make_service

TELLS = Telemetry(timings=True, progress=True)


async def test_first_delta_has_the_times_so_far_if_they_are_asked_for(tokenizer: Tokenizer) -> None:
    for tells in (False, True):
        pool = FakePool()
        request = generation_request(shown=ResponseOptions(telemetry=TELLS if tells else None))
        generation = await make_service(tokenizer, pool).start(request)
        stream, deltas = pool.submitted[0].stream, generation.deltas()
        stream.started = Timings(1.0, 2.0, 0.0, 1)
        pool.send_tokens(stream, [65])
        first = (await anext(deltas))[0]
        pool.send_tokens(stream, [66])
        second = (await anext(deltas))[0]
        generation.close()
        assert (first.timings is not None, second.timings) == (tells, None)
        assert not tells or (first.timings is not None and first.timings.prefill_ms == 2.0)


async def test_every_delta_has_the_usage_so_far_if_it_is_asked_for(tokenizer: Tokenizer) -> None:
    for tells in (False, True):
        pool = FakePool()
        request = generation_request(shown=ResponseOptions(continuous_usage=tells))
        generation = await make_service(tokenizer, pool).start(request)
        stream, deltas, found = pool.submitted[0].stream, generation.deltas(), []
        for id in (65, 66):
            pool.send_tokens(stream, [id])
            found.append((await anext(deltas))[0].usage)
        generation.close()
        assert [one and one.completion_tokens for one in found] == ([1, 2] if tells else [None, None])

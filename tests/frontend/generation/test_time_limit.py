"""An output that takes longer than its time limit ends at a line break."""

import asyncio

from frontend.request import Features, Finish
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.generation.harness import encode, generation_request, make_service


async def test_output_that_takes_too_long_ends_at_a_line_break(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(
        generation_request(stops=("ENDE",), features=Features(output_ms=1))
    )
    stream, deltas = pool.submitted[0].stream, generation.deltas()
    said = ""
    for text in ("a", "b", "c\nEN"):
        pool.send_tokens(stream, ids(text))
        (delta,) = await anext(deltas)
        said += delta.text
        assert (delta.finish is Finish.LENGTH) == ("\n" in text)
        await asyncio.sleep(0.01)
    assert said == "abc\nEN" and pool.aborted == [stream.id]
    assert delta.usage is not None and delta.usage.completion_tokens == len(ids("abc\nEN"))

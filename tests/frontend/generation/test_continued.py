"""An output that continues an earlier output sends only new text, and finds stop strings that begin before it."""

from frontend.request import Features, Finish
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, sending
from tests.frontend.generation.harness import collect, encode, generation_request, make_service


async def test_earlier_tokens_are_not_told_again_but_count_as_prompt(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool(sending(ids("ND of"), ids(" it")))
    features = Features(continued=tuple(ids("The E")))
    generation = await make_service(tokenizer, pool).start(generation_request(features=features, stops=("ENDE",)))
    deltas = [delta for arrived in await collect(generation) for delta in arrived]
    assert "".join([delta.text for delta in deltas]) == "ND of it"
    assert "".join([text for delta in deltas for text in delta.extras.before]) == "The E"
    usage = deltas[-1].usage
    assert usage is not None and usage.continued_tokens == len(ids("The E"))
    assert usage.completion_tokens == len(ids("ND of") + ids(" it"))


async def test_stop_string_that_begins_in_the_earlier_output_is_found(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool(sending(ids("ND of")))
    features = Features(continued=tuple(ids("The E")))
    generation = await make_service(tokenizer, pool).start(generation_request(features=features, stops=("END",)))
    (delta,) = (await collect(generation))[-1]
    assert (delta.finish, delta.stop) == (Finish.STOP, "END")

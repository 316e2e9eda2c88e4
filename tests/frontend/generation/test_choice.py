"""One choice: its deltas and its finish."""

from frontend.request import Finish
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from tests.fakes import FakePool, sending
from tests.frontend.generation.harness import collect, encode, generation_request, make_service


async def test_deltas_of_one_sequence_join_to_its_text(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool(sending(ids("Hello "), ids("the €"), [265]))
    generation = await make_service(tokenizer, pool).start(generation_request())
    deltas = [delta for arrived in await collect(generation) for delta in arrived]
    assert "".join(delta.text for delta in deltas) == "Hello the €"
    assert [id for delta in deltas for id in delta.ids] == [*ids("Hello "), *ids("the €"), 265]
    last = deltas[-1]
    assert last.finish is Finish.EOS and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, len(ids("Hello ") + ids("the €")) + 1)
    assert last.seed == 77 and last.texts[-1] == ""
    assert (last.stop, last.matched_stop) == (None, 265)
    assert all(delta.finish is None for delta in deltas[:-1])


async def test_finish_by_a_stop_token_names_its_id(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([65, 66], outcome=Outcome.STOP))
    deltas = (await collect(await make_service(tokenizer, pool).start(generation_request())))[-1]
    assert (deltas[0].finish, deltas[0].stop, deltas[0].matched_stop) == (Finish.STOP, 66, 66)


async def test_finish_at_the_limit_matches_no_stop(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([65, 66], outcome=Outcome.LENGTH))
    deltas = (await collect(await make_service(tokenizer, pool).start(generation_request())))[-1]
    assert (deltas[0].finish, deltas[0].stop, deltas[0].matched_stop) == (Finish.LENGTH, None, None)

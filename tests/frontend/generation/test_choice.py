"""One choice: deltas, finish, echo and log-probabilities."""

from frontend.request import Finish
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome, Sampling
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
    assert all(delta.finish is None for delta in deltas[:-1])


async def test_finish_by_a_stop_token_names_its_id(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([65, 66], outcome=Outcome.STOP))
    deltas = (await collect(await make_service(tokenizer, pool).start(generation_request())))[-1]
    assert (deltas[0].finish, deltas[0].stop) == (Finish.STOP, 66)


async def test_echo_puts_the_prompt_first_with_its_logprobs(tokenizer: Tokenizer) -> None:
    prompt = [264, *encode(tokenizer)("ab")]
    pool = FakePool()
    sampling = Sampling(max_tokens=2, logprobs=1, prompt_logprobs=True)
    request = generation_request(prompts=(prompt,), sampling=sampling, echo=("ab",))
    generation = await make_service(tokenizer, pool).start(request)
    stream = pool.submitted[0].stream
    pool.send_logprobs(stream, 1, [-1.0, -2.0], prompt=True, k=1)
    pool.send_logprobs(stream, 0, [-3.0], k=1)
    pool.send_tokens(stream, encode(tokenizer)("c"))
    pool.end(stream, Outcome.LENGTH)
    ((delta,),) = await collect(generation)
    assert delta.text == "abc" and delta.logprobs is not None and delta.usage is not None
    assert [score.logprob for score in delta.logprobs[1:]] == [-1.0, -2.0, -3.0]
    assert delta.logprobs[0].logprob != delta.logprobs[0].logprob  # the first has none
    assert [score.token_id for score in delta.logprobs] == delta.ids
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (3, 1)


async def test_logprobs_of_held_back_text_stay_with_their_tokens(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)("aEb")
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(
        generation_request(stops=("END",), sampling=Sampling(max_tokens=9, logprobs=0))
    )
    stream = pool.submitted[0].stream
    deltas = generation.deltas()
    for offset, id in enumerate(ids):
        pool.send_logprobs(stream, offset, [-float(offset)])
        pool.send_tokens(stream, [id])
        if offset == 1:
            (first,) = await anext(deltas)
    pool.end(stream, Outcome.LENGTH)
    (rest,) = await anext(deltas)
    scores = [(score.token_id, score.logprob) for delta in (first, rest) for score in delta.logprobs or ()]
    assert scores == [(id, -float(offset)) for offset, id in enumerate(ids)]

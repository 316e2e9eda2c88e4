"""Log-probabilities of the output and of the prompt."""

from frontend.request import Features
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome, Sampling
from tests.fakes import FakePool
from tests.frontend.generation.harness import encode, generation_request, make_service


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


async def test_prompt_logprobs_come_with_the_last_delta(tokenizer: Tokenizer) -> None:
    sampling = Sampling(max_tokens=2, prompt_logprobs=True, prompt_top=1)
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(
        generation_request(prompts=([5, 6, 7],), sampling=sampling, features=Features(prompt_logprobs=1))
    )
    stream = pool.submitted[0].stream
    pool.send_logprobs(stream, 1, [-1.0, -2.0], prompt=True, k=1)
    pool.send_tokens(stream, [65])
    deltas = generation.deltas()
    (first,) = await anext(deltas)
    pool.end(stream, Outcome.LENGTH)
    (last,) = await anext(deltas)
    assert first.added is None and last.logprobs is None
    scores = last.extras.prompt_logprobs
    assert scores is not None and [one.token_id for one in scores] == [5, 6, 7]
    assert [one.logprob for one in scores[1:]] == [-1.0, -2.0] and len(scores[1].top) == 1

"""`echo` puts the prompt before the output."""

from frontend.request import Features
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome, Sampling
from tests.fakes import FakePool
from tests.frontend.generation.harness import collect, encode, generation_request, make_service


async def test_echo_puts_the_prompt_first_with_its_logprobs(tokenizer: Tokenizer) -> None:
    prompt = [264, *encode(tokenizer)("ab")]
    pool = FakePool()
    sampling = Sampling(max_tokens=2, logprobs=1, prompt_logprobs=True)
    request = generation_request(prompts=(prompt,), sampling=sampling, features=Features(echo=("ab",)))
    generation = await make_service(tokenizer, pool).start(request)
    stream = pool.submitted[0].stream
    pool.send_logprobs(stream, 1, [-1.0, -2.0], prompt=True, k=1)
    pool.send_logprobs(stream, 0, [-3.0], k=1)
    pool.send_tokens(stream, encode(tokenizer)("c"))
    pool.end(stream, Outcome.LENGTH)
    ((delta,),) = await collect(generation)
    assert delta.text == "abc" and delta.logprobs is not None and delta.usage is not None
    assert [score.logprob for score in delta.logprobs[1:]] == [-1.0, -2.0, -3.0]
    assert delta.logprobs[0].logprob != delta.logprobs[0].logprob  # NaN: the first token has no log-probability
    assert [score.token_id for score in delta.logprobs] == delta.ids
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (3, 1)

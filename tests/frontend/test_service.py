"""One request's life over a worker played by hand."""

import asyncio
from collections.abc import Callable

import pytest

from frontend.errors import DeadlineExceeded, Internal, Overloaded, SluiceError, Unprocessable
from frontend.generation.generation import Generation, RequestMetrics
from frontend.generation.service import Service
from frontend.request import Delta, Finish, GenerationRequest
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import DRAINING, READY, not_ready
from shared.messages import Outcome, Sampling
from tests.fakes import FakePool, saying


class Recorder(RequestMetrics):
    def __init__(self) -> None:
        self.aborts: list[str] = []
        self.finishes: list[Finish] = []
        self.tokens = 0

    def first_tokens(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, finish: Finish, seconds: float) -> None:
        self.finishes.append(finish)

    def aborted(self, reason: str) -> None:
        self.aborts.append(reason)


def service(tokenizer: Tokenizer, link: FakePool) -> Service:
    loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loaded.set_result(tokenizer)
    return Service(link, loaded, Recorder())


def generation_request(**more: object) -> GenerationRequest:
    settings = {"prompts": ([1, 2, 3],), "sampling": Sampling(max_tokens=50), **more}
    return GenerationRequest(**settings)  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[list[Delta]]:
    return [arrived async for arrived in generation.deltas()]


def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode_now([text], False)[0]


async def test_one_sequence_becomes_deltas_that_join_to_its_text(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    link = FakePool(saying(ids("Hello "), ids("the €"), [265]))
    generation = await service(tokenizer, link).start(generation_request())
    deltas = [delta for arrived in await collect(generation) for delta in arrived]
    assert "".join(delta.text for delta in deltas) == "Hello the €"
    assert [id for delta in deltas for id in delta.ids] == [*ids("Hello "), *ids("the €"), 265]
    last = deltas[-1]
    assert last.finish is Finish.EOS and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, len(ids("Hello ") + ids("the €")) + 1)
    assert last.seed == 77 and last.texts[-1] == ""
    assert all(delta.finish is None for delta in deltas[:-1])


async def test_what_came_while_the_consumer_was_busy_is_one_delta(tokenizer: Tokenizer) -> None:
    link = FakePool()
    generation = await service(tokenizer, link).start(generation_request())
    stream = link.submitted[0].stream
    deltas = generation.deltas()
    for id in encode(tokenizer)("abc"):
        link.say(stream, [id])
    assert [delta.text for delta in await anext(deltas)] == ["abc"]
    link.say(stream, encode(tokenizer)("d"))
    link.end(stream, Outcome.LENGTH)
    (last,) = await anext(deltas)
    assert (last.text, last.finish) == ("d", Finish.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)


async def test_a_stop_string_ends_the_choice_and_aborts_at_once(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    link = FakePool()
    served = service(tokenizer, link)
    generation = await served.start(generation_request(stops=("END",)))
    stream = link.submitted[0].stream
    link.say(stream, ids("some E"))
    deltas = generation.deltas()
    assert (await anext(deltas))[0].text == "some "
    link.say(stream, ids("NDless"))
    (last,) = await anext(deltas)
    assert link.aborted == [stream.id]
    assert (last.text, last.finish, last.stop) == ("", Finish.STOP, "END")
    assert last.usage is not None and last.usage.completion_tokens == len(ids("some END"))
    assert await anext(deltas, None) is None
    assert served.generations == set()
    assert served.metrics.aborts == ["stop"] and served.metrics.finishes == [Finish.STOP]  # type: ignore[attr-defined]


async def test_a_stop_token_is_named_by_its_id(tokenizer: Tokenizer) -> None:
    link = FakePool(saying([65, 66], outcome=Outcome.STOP))
    deltas = (await collect(await service(tokenizer, link).start(generation_request())))[-1]
    assert (deltas[0].finish, deltas[0].stop) == (Finish.STOP, 66)


@pytest.mark.parametrize(
    ("outcome", "kind", "status"),
    [
        (Outcome.ERROR, Internal, 500),
        (Outcome.ABORTED, Internal, 500),
        (Outcome.DEADLINE, DeadlineExceeded, 504),
        (Outcome.SHUTDOWN, Overloaded, 503),
    ],
)
async def test_a_failed_end_raises_after_what_came_before_it(
    tokenizer: Tokenizer, outcome: Outcome, kind: type[SluiceError], status: int
) -> None:
    link = FakePool(saying(encode(tokenizer)("half"), outcome=outcome, error="because"))
    deltas = (await service(tokenizer, link).start(generation_request())).deltas()
    (delta,) = await anext(deltas)
    assert (delta.text, delta.finish) == ("half", None)
    with pytest.raises(kind, match="because") as failure:
        await anext(deltas)
    assert failure.value.status == status


async def test_closing_early_aborts_all_streams(tokenizer: Tokenizer) -> None:
    link = FakePool()
    served = service(tokenizer, link)
    generation = await served.start(generation_request(n=3))
    deltas = generation.deltas()
    link.say(link.submitted[0].stream, [65])
    await anext(deltas)
    await deltas.aclose()
    assert sorted(link.aborted) == [1, 2, 3]
    assert served.metrics.aborts == ["client"] * 3 and served.generations == set()  # type: ignore[attr-defined]


async def test_closing_without_ever_listening_aborts_too(tokenizer: Tokenizer) -> None:
    link = FakePool()
    generation = await service(tokenizer, link).start(generation_request())
    generation.close()
    generation.close()
    assert link.aborted == [1]


async def test_who_comes_while_it_drains_is_told_to_come_back_later(tokenizer: Tokenizer) -> None:
    served = service(tokenizer, FakePool())
    served.draining = True
    with pytest.raises(Overloaded) as refused:
        await served.start(generation_request())
    assert (refused.value.code, refused.value.retry_after) == ("draining", 5.0)


async def test_prompts_and_choices_are_told_apart_and_seeded(tokenizer: Tokenizer) -> None:
    link = FakePool()
    generation = await service(tokenizer, link).start(
        generation_request(prompts=([1], [2, 3]), n=2, sampling=Sampling(max_tokens=9, seed=2**64 - 1))
    )
    assert [one.prompt for one in link.submitted] == [[1], [1], [2, 3], [2, 3]]
    assert [one.sampling.seed for one in link.submitted] == [2**64 - 1, 0] * 2
    groups = [one.group for one in link.submitted]
    assert groups[0] == groups[1] != groups[2] == groups[3] and 0 not in groups
    for letter, one in enumerate(link.submitted):
        link.say(one.stream, [32 + letter])
        link.end(one.stream)
    deltas = [delta for arrived in await collect(generation) for delta in arrived]
    assert sorted(delta.index for delta in deltas if delta.finish) == [0, 1, 2, 3]
    texts = {delta.index: delta.text for delta in deltas}
    assert texts == {i: tokenizer.decode([32 + i]) for i in range(4)}
    assert link.aborted == []


async def test_one_failed_choice_fails_the_request_and_ends_the_others(tokenizer: Tokenizer) -> None:
    link = FakePool()
    generation = await service(tokenizer, link).start(generation_request(n=2))
    link.end(link.submitted[1].stream, Outcome.ERROR, "broken")
    with pytest.raises(Internal, match="broken"):
        await collect(generation)
    assert link.aborted == [1]


async def test_all_sequences_are_admitted_or_none(tokenizer: Tokenizer) -> None:
    link = FakePool(refusals={1: Overloaded("full", code="queue_full", retry_after=3.0)})
    served = service(tokenizer, link)
    with pytest.raises(Overloaded, match="full"):
        await served.start(generation_request(n=3))
    assert sorted(link.aborted) == [one.stream.id for one in link.submitted] and len(link.submitted) == 2
    assert served.generations == set()


async def test_leaving_during_admission_aborts_what_was_admitted(tokenizer: Tokenizer) -> None:
    link = FakePool(delays={1: 60.0})
    task = asyncio.create_task(service(tokenizer, link).start(generation_request(n=2)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(link.submitted) == 1
    assert link.aborted == [link.submitted[0].stream.id]


async def test_echo_puts_the_prompt_first_with_its_scores(tokenizer: Tokenizer) -> None:
    prompt = [264, *encode(tokenizer)("ab")]
    link = FakePool()
    sampling = Sampling(max_tokens=2, logprobs=1, prompt_logprobs=True)
    asked = generation_request(prompts=(prompt,), sampling=sampling, echo=("ab",))
    generation = await service(tokenizer, link).start(asked)
    stream = link.submitted[0].stream
    link.score(stream, 1, [-1.0, -2.0], prompt=True, k=1)
    link.score(stream, 0, [-3.0], k=1)
    link.say(stream, encode(tokenizer)("c"))
    link.end(stream, Outcome.LENGTH)
    ((delta,),) = await collect(generation)
    assert delta.text == "abc" and delta.logprobs is not None and delta.usage is not None
    assert [score.logprob for score in delta.logprobs[1:]] == [-1.0, -2.0, -3.0]
    assert delta.logprobs[0].logprob != delta.logprobs[0].logprob  # the first has none
    assert [score.token_id for score in delta.logprobs] == delta.ids
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (3, 1)


async def test_scores_stay_with_their_tokens_while_a_stop_holds_some_back(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)("aEb")
    link = FakePool()
    generation = await service(tokenizer, link).start(
        generation_request(stops=("END",), sampling=Sampling(max_tokens=9, logprobs=0))
    )
    stream = link.submitted[0].stream
    deltas = generation.deltas()
    for offset, id in enumerate(ids):
        link.score(stream, offset, [-float(offset)])
        link.say(stream, [id])
        if offset == 1:
            (first,) = await anext(deltas)
    link.end(stream, Outcome.LENGTH)
    (rest,) = await anext(deltas)
    scores = [(score.token_id, score.logprob) for delta in (first, rest) for score in delta.logprobs or ()]
    assert scores == [(id, -float(offset)) for offset, id in enumerate(ids)]


async def test_drain_refuses_new_ones_waits_and_then_tells_the_rest(tokenizer: Tokenizer) -> None:
    link = FakePool()
    served = service(tokenizer, link)
    quick, slow = await served.start(generation_request()), await served.start(generation_request())
    draining = asyncio.create_task(served.drain(0.2))
    await asyncio.sleep(0)
    assert served.readiness == DRAINING
    with pytest.raises(Overloaded, match="draining"):
        await served.start(generation_request())
    link.end(link.submitted[0].stream)
    assert (await collect(quick))[-1][0].finish is Finish.EOS
    with pytest.raises(Overloaded, match="shutting down"):
        await collect(slow)
    await draining
    assert served.generations == set()


async def test_not_ready_reasons_come_in_order(tokenizer: Tokenizer) -> None:
    link = FakePool(readiness=not_ready("no worker yet"))
    loading: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    served = Service(link, loading)
    assert served.readiness == not_ready("loading the tokenizer")
    with pytest.raises(Overloaded):
        _ = served.tokenizer
    loading.set_result(tokenizer)
    assert served.readiness == not_ready("no worker yet")
    link.readiness = READY
    assert served.readiness == READY
    other = link.welcome
    assert other is not None
    link.welcome = type(other)(1, 1, 1, "tiny", "not that hash", other.limits)
    assert served.readiness == not_ready("the worker has another tokenizer")


async def test_a_request_waits_a_moment_for_a_worker_that_has_only_to_return_the_greeting(tokenizer: Tokenizer) -> None:
    link = FakePool(readiness=not_ready("greeting the worker"), handshaking=True)
    served = service(tokenizer, link)

    async def answer() -> None:
        await asyncio.sleep(0.05)
        link.readiness, link.handshaking = READY, False

    answering = asyncio.create_task(answer())
    await served.wait_for_handshake()
    await answering


@pytest.mark.parametrize("handshaking", [True, False])
async def test_but_not_for_long_and_not_for_one_that_is_loading(tokenizer: Tokenizer, handshaking: bool) -> None:
    served = service(tokenizer, FakePool(readiness=not_ready("no worker yet"), handshaking=handshaking))
    waiting = asyncio.create_task(served.wait_for_handshake())
    await asyncio.sleep(0.1)
    assert waiting.done() is not handshaking
    with pytest.raises(Overloaded, match="no worker yet"):
        await waiting


async def test_a_refusal_for_good_is_passed_on(tokenizer: Tokenizer) -> None:
    link = FakePool(refusals={0: Unprocessable("too long", code="context_length_exceeded")})
    with pytest.raises(Unprocessable, match="too long"):
        await service(tokenizer, link).start(generation_request())

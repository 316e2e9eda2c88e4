"""The service: admission, readiness, drain."""

import asyncio

import msgspec
import pytest

from frontend.errors import Overloaded, Unprocessable
from frontend.generation.service import MAX_TOKENS, Service
from frontend.request import Features, Finish
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import DRAINING, READY, not_ready
from shared import messages as m
from shared.messages import Sampling
from tests.fakes import LIMITS, FakePool
from tests.frontend.generation.harness import collect, generation_request, make_service


async def test_start_while_draining_is_refused_with_retry_after(tokenizer: Tokenizer) -> None:
    service = make_service(tokenizer, FakePool())
    service.draining = True
    with pytest.raises(Overloaded) as refused:
        await service.start(generation_request())
    assert (refused.value.code, refused.value.retry_after) == ("draining", 5.0)


async def test_start_of_several_prompts_and_choices_groups_and_seeds_them(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    generation = await make_service(tokenizer, pool).start(
        generation_request(prompts=([1], [2, 3]), n=2, sampling=Sampling(max_tokens=9, seed=2**64 - 1))
    )
    assert [submitted.prompt for submitted in pool.submitted] == [[1], [1], [2, 3], [2, 3]]
    assert [submitted.sampling.seed for submitted in pool.submitted] == [2**64 - 1, 0] * 2
    groups = [submitted.group for submitted in pool.submitted]
    assert groups[0] == groups[1] != groups[2] == groups[3] and 0 not in groups
    for letter, one in enumerate(pool.submitted):
        pool.send_tokens(one.stream, [32 + letter])
        pool.end(one.stream)
    deltas = [delta for arrived in await collect(generation) for delta in arrived]
    assert sorted(delta.index for delta in deltas if delta.finish) == [0, 1, 2, 3]
    texts = {delta.index: delta.text for delta in deltas}
    assert texts == {i: tokenizer.decode([32 + i]) for i in range(4)}
    assert pool.aborted == []


async def test_start_with_one_refused_sequence_aborts_the_admitted_ones(tokenizer: Tokenizer) -> None:
    pool = FakePool(refusals={1: Overloaded("full", code="queue_full", retry_after=3.0)})
    service = make_service(tokenizer, pool)
    with pytest.raises(Overloaded, match="full"):
        await service.start(generation_request(n=3))
    assert sorted(pool.aborted) == [submitted.stream.id for submitted in pool.submitted] and len(pool.submitted) == 2
    assert service.generations == set()


async def test_start_cancelled_during_admission_aborts_the_admitted_ones(tokenizer: Tokenizer) -> None:
    pool = FakePool(delays={1: 60.0})
    task = asyncio.create_task(make_service(tokenizer, pool).start(generation_request(n=2)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(pool.submitted) == 1
    assert pool.aborted == [pool.submitted[0].stream.id]


async def test_drain_refuses_new_requests_waits_and_fails_the_remaining(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    service = make_service(tokenizer, pool)
    quick, slow = await service.start(generation_request()), await service.start(generation_request())
    draining = asyncio.create_task(service.drain(0.2))
    await asyncio.sleep(0)
    assert service.readiness == DRAINING
    with pytest.raises(Overloaded, match="draining"):
        await service.start(generation_request())
    pool.end(pool.submitted[0].stream)
    assert (await collect(quick))[-1][0].finish is Finish.EOS
    with pytest.raises(Overloaded, match="shutting down"):
        await collect(slow)
    await draining
    assert service.generations == set()


async def test_readiness_names_tokenizer_then_worker_then_mismatch(tokenizer: Tokenizer) -> None:
    pool = FakePool(readiness=not_ready("no worker yet"))
    loading: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    service = Service(pool, loading)
    assert service.readiness == not_ready("loading the tokenizer")
    with pytest.raises(Overloaded):
        _ = service.tokenizer
    loading.set_result(tokenizer)
    assert service.readiness == not_ready("no worker yet")
    pool.readiness = READY
    assert service.readiness == READY
    other = pool.welcome
    assert other is not None
    pool.welcome = type(other)(1, 1, 1, "tiny", "not that hash", other.limits)
    assert service.readiness == not_ready("the worker has another tokenizer")


async def test_wait_for_handshake_returns_when_the_worker_becomes_ready(tokenizer: Tokenizer) -> None:
    pool = FakePool(readiness=not_ready("greeting the worker"), handshaking=True)
    service = make_service(tokenizer, pool)

    async def answer() -> None:
        await asyncio.sleep(0.05)
        pool.readiness, pool.handshaking = READY, False

    answering = asyncio.create_task(answer())
    await service.wait_for_handshake()
    await answering


@pytest.mark.parametrize("handshaking", [True, False])
async def test_wait_for_handshake_gives_up_soon_and_at_once_without_a_handshake(
    tokenizer: Tokenizer, handshaking: bool
) -> None:
    service = make_service(tokenizer, FakePool(readiness=not_ready("no worker yet"), handshaking=handshaking))
    waiting = asyncio.create_task(service.wait_for_handshake())
    await asyncio.sleep(0.1)
    assert waiting.done() is not handshaking
    with pytest.raises(Overloaded, match="no worker yet"):
        await waiting


async def test_start_with_an_unprocessable_sequence_raises_the_refusal(tokenizer: Tokenizer) -> None:
    pool = FakePool(refusals={0: Unprocessable("too long", code="context_length_exceeded")})
    with pytest.raises(Unprocessable, match="too long"):
        await make_service(tokenizer, pool).start(generation_request())


def holding(sequences: int) -> FakePool:
    """Returns a pool whose worker can hold a given number of sequences."""
    return FakePool(welcome=m.Welcome(1, 1, 4711, "tiny", "", msgspec.structs.replace(LIMITS, max_sequences=sequences)))


@pytest.mark.parametrize(("prompts", "n", "param"), [(([1], [2]), 5, "n"), (([1],) * 9, 1, "prompt")])
async def test_start_of_more_sequences_than_workers_hold_is_refused_before_any_is_submitted(
    tokenizer: Tokenizer, prompts: tuple[list[int], ...], n: int, param: str
) -> None:
    pool = holding(8)
    with pytest.raises(Unprocessable, match="room for 8") as refused:
        await make_service(tokenizer, pool).start(generation_request(prompts=prompts, n=n))
    assert (refused.value.param, pool.calls) == (param, 0)
    await make_service(tokenizer, pool).start(generation_request(prompts=([1], [2]), n=4))
    assert pool.calls == 8


async def test_start_of_more_tokens_than_a_request_may_have_is_refused_before_any_is_submitted(
    tokenizer: Tokenizer,
) -> None:
    pool = FakePool()
    long = [7] * (1 + MAX_TOKENS // 128)
    with pytest.raises(Unprocessable, match=str(MAX_TOKENS)) as refused:
        await make_service(tokenizer, pool).start(generation_request(prompts=(long,), n=128))
    assert (refused.value.param, pool.calls) == ("n", 0)
    with pytest.raises(Unprocessable):
        await make_service(tokenizer, pool).start(generation_request(features=Features(continued=tuple(long)), n=128))

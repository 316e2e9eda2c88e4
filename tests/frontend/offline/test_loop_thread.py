"""The event loop in a thread, through the Python API: abandoned jobs, closing, errors while opening."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deploy.offline.batch import BatchRunner
from deploy.offline.inputs import Contexts
from deploy.offline.llm import LLM, CannotStart
from deploy.offline.loop_thread import Closed
from frontend.generation.service import Service
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, context
from tests.frontend.offline.harness import echoing, ids_of, llm_over, until


def test_iterate_left_early_cancels_its_job(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=lambda pool, stream: pool.send_tokens(stream, ids_of(tokenizer, "h")))
    with llm_over(pool, tokenizer) as llm:
        for text in llm.generate("abc", stream=True):
            assert text == "h"
            break
        gc.collect()
        until(lambda: pool.aborted == [1])


async def test_iterate_async_closed_early_cancels_its_job(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=lambda pool, stream: pool.send_tokens(stream, ids_of(tokenizer, "h")))
    with llm_over(pool, tokenizer) as llm:
        stream = llm.generate_async("abc")
        assert await anext(stream) == "h"
        await stream.aclose()
        await asyncio.to_thread(until, lambda: pool.aborted == [1])


def test_close_ends_running_jobs_and_refuses_new_ones(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=lambda pool, stream: pool.send_tokens(stream, ids_of(tokenizer, "h")))
    with llm_over(pool, tokenizer) as llm:
        stream = llm.generate("abc", stream=True)
        assert next(stream) == "h"
        llm.close()
        with pytest.raises(Closed):
            next(stream)
        with pytest.raises(Closed):
            llm.generate("abc")
        assert pool.aborted == [1]


def test_close_by_the_garbage_collector_closes_the_resource(tokenizer: Tokenizer) -> None:
    closed: list[bool] = []

    @asynccontextmanager
    async def open_runner() -> AsyncIterator[BatchRunner]:
        loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        loaded.set_result(tokenizer)
        yield BatchRunner(Service(FakePool(play=echoing()), loaded), Contexts(context(tokenizer, max_seq_len=160)))
        closed.append(True)

    assert LLM.over(open_runner).generate("abc") == "abc"
    gc.collect()
    assert closed == [True]


def test_error_while_opening_is_raised() -> None:
    @asynccontextmanager
    async def open_runner() -> AsyncIterator[BatchRunner]:
        raise CannotStart("no such thing")
        yield

    with pytest.raises(CannotStart, match="no such thing"):
        LLM.over(open_runner)

"""The engine for Dynamo: its requests and the chunks that it yields. Empty modules replace Dynamo's own package."""

import asyncio
import importlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from types import ModuleType
from typing import Any

import msgspec
import pytest


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = {
        "aiohttp": (), "dynamo": (), "dynamo.common": (), "dynamo.common.backend": (),
        "dynamo.common.backend.engine": ("EngineConfig", "LLMEngine", "LlmRegistration"),
        "dynamo.common.backend.run": ("run",), "dynamo.common.backend.worker": ("WorkerConfig",),
    }  # fmt: skip
    for name, members in names.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "deploy.integrations.dynamo", ModuleType("stands in until the import"))
    del sys.modules["deploy.integrations.dynamo"]
    return importlib.import_module("deploy.integrations.dynamo")


def test_a_request_becomes_a_completion_of_token_ids(engine: ModuleType) -> None:
    request = {
        "token_ids": [1, 2], "sampling_options": {"temperature": 0.5, "n": 1, "top_k": None},
        "stop_conditions": {"max_tokens": 7, "stop_token_ids": [3], "stop": ["x"]},
        "output_options": {"logprobs": None},
    }  # fmt: skip
    assert engine.body_of(request) == {
        "prompt": [1, 2], "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
        "temperature": 0.5, "max_tokens": 7, "stop_token_ids": [3],
    }  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [
        {"multi_modal_data": {"image": []}}, {"sampling_options": {"n": 2}}, {"output_options": {"logprobs": 0}},
        {"sampling_options": {"guided_decoding": {"json": {}}}}, {"prefill_result": {"x": 1}},
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused_by_name(engine: ModuleType, what: dict[str, Any]) -> None:
    (inner,) = what.values()
    name = next(iter(inner)) if next(iter(what)).endswith("_options") else next(iter(what))
    with pytest.raises(ValueError, match=name):
        engine.body_of({"token_ids": [1], **what})


def events(*found: Any, done: bool = True) -> AsyncIterator[bytes]:
    async def lines() -> AsyncIterator[bytes]:
        for one in found:
            yield b": a comment\n"
            yield b"data: " + msgspec.json.encode(one) + b"\n"
        if done:
            yield b"data: [DONE]\n"

    return lines()


def choice(ids: list[int], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "finish_reason": reason}]}


async def test_a_stream_becomes_chunks_and_its_end(engine: ModuleType) -> None:
    usage = {"completion_tokens": 3}
    found = [one async for one in engine.chunks_of(
        events(choice([5, 6]), choice([7], "stop"), {"choices": [], "usage": usage})
    )]  # fmt: skip
    assert found == [
        {"token_ids": [5, 6], "index": 0}, {"token_ids": [7], "index": 0},
        {"token_ids": [], "index": 0, "finish_reason": "stop", "completion_usage": usage},
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [[{"error": {"message": "shut down"}}], [choice([5])]])
async def test_a_stream_with_an_error_or_without_an_end_fails(engine: ModuleType, cut: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"shut down|ended before its end"):
        _ = [one async for one in engine.chunks_of(events(*cut, done=False))]


async def test_a_request_that_is_stopped_between_two_chunks_ends_at_once(engine: ModuleType) -> None:
    stopped, closed = asyncio.get_running_loop().create_future(), list[str]()

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"token_ids": [5], "index": 0}
            await asyncio.sleep(3600)
        finally:
            closed.append("the request to the server")

    found = engine.until(stopped, chunks())
    assert (await anext(found))["token_ids"] == [5]
    asyncio.get_running_loop().call_later(0.01, stopped.set_result, None)
    assert (await asyncio.wait_for(anext(found), 10))["finish_reason"] == "cancelled"
    assert closed and [one async for one in found] == []


async def test_chunks_pass_until_their_end_or_error(engine: ModuleType) -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"token_ids": [5], "index": 0}
        raise RuntimeError("the worker was lost")

    never = asyncio.get_running_loop().create_future()
    found = engine.until(never, engine.chunks_of(events(choice([5, 6], "stop"))))
    assert [one["token_ids"] async for one in found] == [[5, 6], []]
    with pytest.raises(RuntimeError, match="the worker was lost"):
        _ = [one async for one in engine.until(never, chunks())]

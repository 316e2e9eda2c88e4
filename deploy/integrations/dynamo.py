"""An engine of Dynamo's backend interface (`dynamo.common.backend.LLMEngine`) that computes with a server of Sluice.

    python -m deploy.integrations.dynamo --model Qwen/Qwen3-0.6B --server http://127.0.0.1:8000 --discovery-backend file

Dynamo's frontend tokenizes the request and detokenizes the answer. This module sends the token ids to
`/v1/completions` of the server. It publishes no K/V events, and refuses features that it does not pass on: grammars,
log-probabilities, images, several choices, and separate prefill.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import aiohttp
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")  # not stop texts: Dynamo's frontend finds these
REFUSED = ("multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result")
CONNECT_S = 10.0
LINE_BYTES = 1 << 24  # limit on the bytes of one event of a stream


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of `/v1/completions` for a request of Dynamo. Raises ValueError for unsupported fields."""
    sampling, stopping = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    output = request.get("output_options") or {}
    for name in REFUSED:
        if request.get(name):
            raise ValueError(f"{name} does not work with this engine")
    if sampling.get("guided_decoding"):
        raise ValueError("guided_decoding does not work with this engine")
    for name in ("n", "best_of"):
        if (sampling.get(name) or 1) > 1:
            raise ValueError(f"{name} above 1 does not work with this engine")
    for name in ("logprobs", "prompt_logprobs"):
        if output.get(name) is not None:
            raise ValueError(f"{name} does not work with this engine")
    body = {"prompt": list(request["token_ids"]), "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    body |= {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    body |= {name: stopping[name] for name in STOPPING if stopping.get(name) is not None}
    return body


async def chunks_of(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Turns a stream of events into Dynamo's chunks. Raises RuntimeError if the stream has an error, or no end."""
    reason: str | None = None
    usage: dict[str, Any] | None = None
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            if choice["token_ids"]:
                yield {"token_ids": choice["token_ids"], "index": 0}
    if reason is None:
        raise RuntimeError("the server's answer ended before its end")
    yield {"token_ids": [], "index": 0, "finish_reason": reason} | ({"completion_usage": usage} if usage else {})


async def until(
    stopped: asyncio.Future[Any], chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of an answer. When `stopped` is done, it cancels the answer and yields a last chunk."""
    while True:
        following = asyncio.ensure_future(anext(chunks, None))
        try:
            await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait({following})
        if stopped.done():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
            return
        chunk = following.result()
        if chunk is None:
            return
        yield chunk


class Engine(LLMEngine):  # type: ignore[misc]  # Dynamo's package is not there when types are checked
    """Passes requests on to one server. To cancel a request, it closes the connection of this request."""

    def __init__(self, server: str, key: str, model: str, served_name: str) -> None:
        self._server, self._model, self._served_name = server.rstrip("/"), model, served_name
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["Engine", Any]:
        parser = argparse.ArgumentParser(prog="python -m deploy.integrations.dynamo")
        parser.add_argument("--model", required=True, help="hub id or folder: Dynamo's frontend reads the tokenizer")
        parser.add_argument("--served-name", default="", help="what clients call the model; empty: as the server does")
        parser.add_argument("--server", default="http://127.0.0.1:8000", help="the server of Sluice")
        parser.add_argument("--api-key", default="", help="a key of the server")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="etcd", choices=("etcd", "kubernetes", "file", "mem"))
        args = parser.parse_args(argv)
        engine = cls(args.server, args.api_key, args.model, args.served_name)
        return engine, WorkerConfig(
            namespace=args.namespace, component="sluice", model_name=args.model,
            served_model_name=args.served_name or None, discovery_backend=args.discovery_backend,
            enable_kv_routing=False,
        )  # fmt: skip

    async def start(self, worker_id: int) -> Any:
        """Raises aiohttp.ClientError if the server does not respond."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=limits, read_bufsize=LINE_BYTES)
        async with self._http.get(f"{self._server}/v1/models", raise_for_status=True) as answer:
            [model, *_] = (await answer.json())["data"]
        length = LlmRegistration(context_length=model.get("max_model_len"))
        return EngineConfig(model=self._model, served_model_name=self._served_name or model["id"], llm=length)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Raises ValueError for a request that this engine or the server refuses, RuntimeError if the answer fails."""
        chunks = self._chunks(body_of(request))
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in until(stopped, chunks):
                    yield chunk
        finally:
            stopped.cancel()

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        assert self._http is not None, "Dynamo starts an engine before it sends requests"
        async with self._http.post(f"{self._server}/v1/completions", json=body) as answer:
            if answer.status != 200:
                failed = ValueError if answer.status in (400, 404, 413, 422) else RuntimeError
                raise failed((await answer.json())["error"]["message"])
            async for chunk in chunks_of(answer.content):
                yield chunk

    async def cleanup(self) -> None:
        if self._http is not None:
            await self._http.close()


if __name__ == "__main__":
    run(Engine)

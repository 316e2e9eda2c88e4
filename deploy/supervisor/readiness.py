"""Polls a server's /ready, and makes the message that a ready server prints. Knows no other route."""

import asyncio
import contextlib
import json
import shlex
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUESTION = {"role": "user", "content": "What is the capital of France?"}
TEXT = {"prompt": "Once upon a time", "max_tokens": 48}


@dataclass(frozen=True, slots=True)
class Readiness:
    """The response of /ready. progress: progress of loading, from 0 to 1. task: what the ready server is used for.

    `task` is a key of EXAMPLES: "chat" if the model has a chat template, else the task of the model.
    """

    ready: bool = False
    reason: str = "starting"
    progress: float = 0.0
    task: str = "generate"


EXAMPLES: Mapping[
    str, tuple[tuple[str, str, Mapping[str, Any]], ...]
] = {  # task → (words for its use, path, body of an example without `model`)
    "chat": (
        ("ask a question", "/v1/chat/completions", {"messages": [QUESTION], "stream": True}),
        ("stream of typed events, one per token", "/v1/completions", {**TEXT, "stream_format": "events"}),
    ),
    "generate": (
        ("stream in OpenAI's format", "/v1/completions", {**TEXT, "stream": True}),
        ("stream of typed events, one per token", "/v1/completions", {**TEXT, "stream_format": "events"}),
    ),
    "embed": (("vectors", "/v1/embeddings", {"input": ["A first text", "a second one"]}),),
    "score": (("documents by relevance", "/v1/rerank", {"query": "A text", "documents": ["one", "another"]}),),
}


async def poll_ready(host: str, port: int, timeout: float = 2.0, *, secure: bool = False) -> Readiness | None:
    """Requests /ready, over TLS if `secure`; returns None if no valid answer arrives within `timeout` seconds."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        return _parse(await asyncio.wait_for(_get(host, port, _tls() if secure else None), timeout))
    return None


def _tls() -> ssl.SSLContext:
    """Returns a TLS context that accepts any certificate: the server is our own, and its certificate seldom names the
    local address."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _get(host: str, port: int, tls: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return await reader.read(-1)
    finally:
        writer.close()


def _parse(response: bytes) -> Readiness:
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    fields = json.loads(body)
    if not isinstance(fields, dict) or status not in (200, 503):
        raise ValueError("not an answer of /ready")
    return Readiness(
        status == 200,
        str(fields.get("reason", "")),
        float(fields.get("progress") or 0.0),
        "chat" if fields.get("chat") else str(fields.get("task", "generate")),
    )


def ready_message(url: str, model: str, task: str, *, keys: bool) -> str:
    """Returns the message for a server that is ready: how to use it, as commands to paste."""
    auth = ' -H "Authorization: Bearer $API_KEY"' if keys else ""
    insecure = " -k" if url.startswith("https:") else ""  # curl does not need -k where the certificate is trusted
    lines = [f"\n{model} is ready at {url} (open it in a browser for a playground)\n"]
    for words, path, body in EXAMPLES.get(task, ()):
        data = shlex.quote(json.dumps({"model": model, **body}))
        lines += [f"{words}:", f"  curl -N{insecure} {url}{path} -H 'Content-Type: application/json'{auth} -d {data}"]
    return "\n".join(lines) + "\n"

"""Asks a running server how it is: one small HTTP GET, and the words for a server that answers.

Knows /ready and nothing else of the frontends.
"""

import asyncio
import contextlib
import json
import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """What /ready said. `progress` is of loading, 0 to 1."""

    ready: bool = False
    reason: str = "starting"
    progress: float = 0.0


async def ask(host: str, port: int, timeout: float = 2.0) -> Health | None:
    """GET /ready; None when nothing sensible came in `timeout` seconds."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        return _understand(await asyncio.wait_for(_get(host, port), timeout))
    return None


async def _get(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return await reader.read(-1)
    finally:
        writer.close()


def _understand(answer: bytes) -> Health:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    said = json.loads(body)
    if not isinstance(said, dict) or status not in (200, 503):
        raise ValueError("not an answer of /ready")
    return Health(status == 200, str(said.get("reason", "")), float(said.get("progress") or 0.0))


def welcome(url: str, model: str, *, keys: bool) -> str:
    """What to do with a server that is ready, in lines that can be pasted."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 48}
    auth = ' -H "Authorization: Bearer $API_KEY"' if keys else ""
    curl = f"  curl -N {url}/v1/completions -H 'Content-Type: application/json'{auth} -d "
    return "\n".join(
        [
            f"\n{model} is ready at {url} (open it in a browser to play with it)\n",
            "OpenAI's stream:",
            curl + shlex.quote(json.dumps(body | {"stream": True})),
            "one typed event a token:",
            curl + shlex.quote(json.dumps(body | {"stream_format": "events"})) + "\n",
        ]
    )

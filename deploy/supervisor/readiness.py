"""Asks a running server how it is: one small HTTP GET, and the words for a server that answers.

Knows /ready and nothing else of the frontends.
"""

import asyncio
import contextlib
import json
import shlex
import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """What /ready said. `progress` is of loading, 0 to 1."""

    ready: bool = False
    reason: str = "starting"
    progress: float = 0.0


async def poll_ready(host: str, port: int, timeout: float = 2.0, *, secure: bool = False) -> Readiness | None:
    """GET /ready, over TLS if `secure`; None when nothing sensible came in `timeout` seconds."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        return _understand(await asyncio.wait_for(_get(host, port, _tls() if secure else None), timeout))
    return None


def _tls() -> ssl.SSLContext:
    """Takes any certificate: it is our own server, on an address that is hardly the certificate's name."""
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


def _understand(answer: bytes) -> Readiness:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    said = json.loads(body)
    if not isinstance(said, dict) or status not in (200, 503):
        raise ValueError("not an answer of /ready")
    return Readiness(status == 200, str(said.get("reason", "")), float(said.get("progress") or 0.0))


def ready_message(url: str, model: str, *, keys: bool) -> str:
    """What to do with a server that is ready, in lines that can be pasted."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 48}
    auth = ' -H "Authorization: Bearer $API_KEY"' if keys else ""
    trust = " -k" if url.startswith("https:") else ""  # leave it out where the certificate is trusted
    curl = f"  curl -N{trust} {url}/v1/completions -H 'Content-Type: application/json'{auth} -d "
    return "\n".join(
        [
            f"\n{model} is ready at {url} (open it in a browser to play with it)\n",
            "OpenAI's stream:",
            curl + shlex.quote(json.dumps(body | {"stream": True})),
            "one typed event a token:",
            curl + shlex.quote(json.dumps(body | {"stream_format": "events"})) + "\n",
        ]
    )

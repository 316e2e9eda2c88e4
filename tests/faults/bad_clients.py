"""Badly behaved clients: slow, not reading, disconnecting, half closed, far too many."""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.faults.fault import Fault, Recovered, at_once
from tests.faults.server import ServerPlan, ServerUnderTest, idle
from tests.patience import PATIENCE_S

BATCH = 100
FREE_S = 1.0  # requests must end within this time after the last client of a batch has left
STEP_S = 0.05  # per token, if workers can be held; an abandoned request then runs for more than a minute


async def _connected(server: ServerUnderTest, **fields: Any) -> socket.socket:
    """Opens a connection with a small receive buffer, and sends a request on it."""
    body = {
        "model": "m",
        "prompt": "Once upon a time",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    data = json.dumps(body).encode()
    where = urlsplit(server.url)
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (where.hostname, where.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await loop.sock_sendall(sock, head + data)
    return sock


async def _slow(sock: socket.socket, rng: random.Random) -> None:
    for _ in range(30):
        await asyncio.get_running_loop().sock_recv(sock, 64)
        await asyncio.sleep(0.1)


async def _not_reading(sock: socket.socket, rng: random.Random) -> None:
    await asyncio.sleep(3.0)


async def _resetting(sock: socket.socket, rng: random.Random) -> None:
    """Resets the connection in the middle of the answer."""
    await asyncio.get_running_loop().sock_recv(sock, 64)
    await asyncio.sleep(rng.uniform(0, 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _half_closed(sock: socket.socket, rng: random.Random) -> None:
    """Closes its sending side and reads to the end."""
    sock.shutdown(socket.SHUT_WR)
    while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        pass


async def _one(
    server: ServerUnderTest, behaviour: Callable[[socket.socket, random.Random], Awaitable[None]], rng: Any
) -> None:
    sock = await _connected(server, **({"max_tokens": 60} if behaviour is _half_closed else {}))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await behaviour(sock, rng)
    except ConnectionError:
        pass
    finally:
        sock.close()


async def bad_clients(server: ServerUnderTest, rng: random.Random) -> Recovered:
    behaviours = [_slow, _not_reading, _resetting, _half_closed] * 4
    await asyncio.gather(*(_one(server, behaviour, rng) for behaviour in behaviours))
    return at_once


async def _leave(server: ServerUnderTest, rng: random.Random) -> None:
    """Disconnects from a stream or a complete response at a random moment, with or without a reset."""
    sock = await _connected(server, stream=rng.random() < 0.7, n=rng.choice([1, 1, 2]))
    await asyncio.sleep(rng.uniform(0, 0.3))
    if rng.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def disconnects(count: int, free_s: float = FREE_S) -> Callable[[ServerUnderTest, random.Random], Awaitable[Recovered]]:
    """Disconnects `count` clients in batches, after the normal streams have ended; checks that their requests end."""

    async def inject(server: ServerUnderTest, rng: random.Random) -> Recovered:
        server.release()
        await server.until_idle()
        delays = []
        for _ in range(count // BATCH):
            with server.slowly(STEP_S):
                await asyncio.gather(*(_leave(server, rng) for _ in range(BATCH)))
                left = time.monotonic()
                await server.until(idle)
                delays.append(time.monotonic() - left)
        assert max(delays) < free_s, f"what {BATCH} clients left ran on for {max(delays):.2f} s"
        return at_once

    return inject


async def crowd(server: ServerUnderTest, rng: random.Random) -> Recovered:
    """Sends more requests than the queue holds: each one is served or refused with 503 and Retry-After."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(
        base_url=server.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(200)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 503}, f"answers: {codes}"
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503), "no Retry-After"
    return at_once


FAULTS = {
    "rude-clients": Fault("slow, not reading, resetting and half-closed clients as well", bad_clients),
    "disconnects": Fault("10,000 clients that leave in the middle", disconnects(10_000)),
    "crowd": Fault("200 more clients than there is room for", crowd, ServerPlan(("--max-waiting-requests", "32"))),
}

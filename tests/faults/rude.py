"""Clients as the world has them: slow, deaf, gone in the middle, half closed, far too many."""

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

from tests.faults.fault import Fault, Healed, at_once
from tests.faults.site import Plan, Site, idle
from tests.patience import PATIENCE_S

BATCH = 100
FREE_S = 1.0  # after the last of a batch has left, nothing of it runs
STEP_S = 0.05  # of a server that can be held: so what is left would run on for more than a minute


async def _connected(site: Site, **fields: Any) -> socket.socket:
    """One that has sent its request, with little room for the answer."""
    body = {
        "model": "m",
        "prompt": "Once upon a time",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    data = json.dumps(body).encode()
    where = urlsplit(site.url)
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (where.hostname, where.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await loop.sock_sendall(sock, head + data)
    return sock


async def _slow(sock: socket.socket, dice: random.Random) -> None:
    for _ in range(30):
        await asyncio.get_running_loop().sock_recv(sock, 64)
        await asyncio.sleep(0.1)


async def _deaf(sock: socket.socket, dice: random.Random) -> None:
    await asyncio.sleep(3.0)


async def _vanishing(sock: socket.socket, dice: random.Random) -> None:
    """With a reset in the middle of the answer."""
    await asyncio.get_running_loop().sock_recv(sock, 64)
    await asyncio.sleep(dice.uniform(0, 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _half_closed(sock: socket.socket, dice: random.Random) -> None:
    """Says that it will send no more, and reads to the end, whatever that is."""
    sock.shutdown(socket.SHUT_WR)
    while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        pass


async def _one(site: Site, manner: Callable[[socket.socket, random.Random], Awaitable[None]], dice: Any) -> None:
    sock = await _connected(site, **({"max_tokens": 60} if manner is _half_closed else {}))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await manner(sock, dice)
    except ConnectionError:
        pass
    finally:
        sock.close()


async def rude(site: Site, dice: random.Random) -> Healed:
    manners = [_slow, _deaf, _vanishing, _half_closed] * 4
    await asyncio.gather(*(_one(site, manner, dice) for manner in manners))
    return at_once


async def _leave(site: Site, dice: random.Random) -> None:
    """At any moment: before the headers, among the tokens, with and without a reset; whole answers and streams."""
    sock = await _connected(site, stream=dice.random() < 0.7, n=dice.choice([1, 1, 2]))
    await asyncio.sleep(dice.uniform(0, 0.3))
    if dice.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def disconnects(count: int, free_s: float = FREE_S) -> Callable[[Site, random.Random], Awaitable[Healed]]:
    """Once the other streams have ended, so that what remains can be seen."""

    async def strike(site: Site, dice: random.Random) -> Healed:
        site.release()
        await site.until_idle()
        late = []
        for _ in range(count // BATCH):
            with site.slowly(STEP_S):
                await asyncio.gather(*(_leave(site, dice) for _ in range(BATCH)))
                left = time.monotonic()
                await site.until(idle)
                late.append(time.monotonic() - left)
        assert max(late) < free_s, f"what {BATCH} clients left ran on for {max(late):.2f} s"
        return at_once

    return strike


async def crowd(site: Site, dice: random.Random) -> Healed:
    """More than there is room for: each is served or refused with 503 and Retry-After."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(
        base_url=site.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(200)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 503}, f"answers: {codes}"
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503), "no Retry-After"
    return at_once


FAULTS = {
    "rude-clients": Fault("slow, deaf, vanishing and half-closed clients beside", rude),
    "disconnects": Fault("10,000 clients that leave in the middle", disconnects(10_000)),
    "crowd": Fault("200 more clients than there is room for", crowd, Plan(("--max-waiting-requests", "32"))),
}

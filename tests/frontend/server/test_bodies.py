"""Limits on bodies: for text, for vision models, and for all bodies together. Many hostile bodies do no harm."""

import asyncio
import base64
import io
import json
import mmap
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from frontend.server import bodies
from frontend.server.bodies import FILE_BYTES, LARGEST_BYTES, TEXT_BYTES, largest_body
from frontend.server.http_protocol import ConnectionLimits
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from tests.checkpoints import VOCAB
from tests.fakes import FakePool, sending
from tests.frontend.serving import app_over, http_client, serving
from tests.images import seeing_checkpoint
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
LIMITS = m.Limits(max_seq_len=4096, vocab_size=VOCAB, eos_token_ids=())


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(seeing_checkpoint("gemma3", tmp_path_factory.mktemp("seeing") / "model"))


def pool() -> FakePool:
    return FakePool(sending([104]), welcome=m.Welcome(1, 1, 4711, "tiny", "", LIMITS))


def photo(nbytes: int) -> str:
    """Returns the data: URL of a JPEG file of this size, padded behind its end, where decoders ignore bytes."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 60)).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue().ljust(nbytes, b"\0")).decode()


def chat(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


@pytest.mark.parametrize("images", range(0, 1025, 64))
def test_largest_body_takes_any_file_and_is_bounded(images: int) -> None:
    most = largest_body(images)
    assert most == TEXT_BYTES if not images else TEXT_BYTES + FILE_BYTES <= most <= LARGEST_BYTES
    assert largest_body(1) == TEXT_BYTES + FILE_BYTES and largest_body(8) == 72 << 20


async def test_body_of_a_model_that_sees_may_be_larger(seeing: Tokenizer, tokenizer: Tokenizer) -> None:
    large, larger = chat(photo(7 << 20), photo(6 << 20)), b" " * (largest_body(2) + 1)
    async with http_client(pool(), seeing, max_images_per_request=2) as http:
        assert (await http.post(CHAT, content=large)).status_code == 200
        refused = await http.post(CHAT, content=larger)
        assert refused.status_code == 413 and "--max-body-bytes" in refused.text
        assert (await http.post(CHAT, content=chat(photo(20 << 20)))).status_code == 200
    for loaded, settings in ((tokenizer, {}), (seeing, {"max_images_per_request": 0}), (seeing, {"max_body_bytes": 9})):
        async with http_client(pool(), loaded, **settings) as http:
            assert (await http.post(CHAT, content=large)).status_code == 413


async def test_large_bodies_together_are_bounded_and_their_room_is_given_back(
    seeing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 14 << 20)
    monkeypatch.setattr(bodies, "GRACE_S", PATIENCE_S)
    body, proceed, began = chat(photo(3 << 20)), asyncio.Event(), asyncio.Semaphore(0)

    async def slow(announced: bool) -> httpx.Response:
        async def pieces() -> Any:
            yield body[: 3 << 20]
            began.release()
            await proceed.wait()
            yield body[3 << 20 :]

        length = {"Content-Length": str(len(body))} if announced else {}
        return await http.post(CHAT, content=pieces(), headers=length)

    async with http_client(pool(), seeing) as http:
        for announced in (True, False):
            waiting = [asyncio.create_task(slow(announced)) for _ in range(2)]
            for _ in waiting:
                await began.acquire()
            await asyncio.sleep(0.05)
            refused, small = await http.post(CHAT, content=body), await http.post(CHAT, content=chat(photo(1000)))
            proceed.set()
            assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "the bodies of all requests" in refused.text and small.status_code == 200
            proceed.clear()
        # after each of these, the count of bytes must be 0 again
        for content in (chat(photo(3 << 20))[:-1], body, b" " * (3 << 20), body):
            await http.post(CHAT, content=content)
        assert (await http.post("/invocations", content=body)).status_code == 200
        assert (await http.post(CHAT, content=body)).status_code == 200


async def unfinished(port: int, nbytes: int, key: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends `nbytes` of a body that never ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {nbytes + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * nbytes)
    await writer.drain()
    return reader, writer


async def small(http: httpx.AsyncClient, key: str) -> int:
    return (await http.post(CHAT, content=chat(photo(1000)), headers={"Authorization": f"Bearer {key}"})).status_code


async def test_unfinished_uploads_of_one_key_leave_room_for_the_others_whatever_their_size(
    seeing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 12 << 20)
    monkeypatch.setattr(bodies, "GRACE_S", PATIENCE_S)
    app = app_over(pool(), seeing, api_key="hostile honest")
    async with serving(app, ConnectionLimits()) as address, httpx.AsyncClient(base_url=address) as http:
        port = int(address.rpartition(":")[2])
        held = [await unfinished(port, 1000 << 10, "hostile") for _ in range(30)]
        async with asyncio.timeout(PATIENCE_S):
            answers = {asyncio.create_task(reader.readline()) for reader, _ in held}
            while sum(one.done() for one in answers) < 22:  # 8 of 12 MiB are the share of one key
                await asyncio.sleep(0.02)
        large = chat(photo(1 << 20))
        assert (await http.post(CHAT, content=large, headers={"Authorization": "Bearer honest"})).status_code == 200
        assert await small(http, "honest") == 200
        for _, writer in held:
            writer.transport.abort()
        assert {await one for one in answers} <= {b"HTTP/1.1 503 Service Unavailable\r\n", b""}
        async with asyncio.timeout(PATIENCE_S):
            while await small(http, "hostile") == 503:
                await asyncio.sleep(0.05)


async def test_upload_that_stands_still_makes_room_for_the_next_of_its_client(
    seeing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 3 << 20)
    monkeypatch.setattr(bodies, "GRACE_S", 0.2)
    app = app_over(pool(), seeing)
    async with serving(app, ConnectionLimits()) as address, httpx.AsyncClient(base_url=address) as http:
        held = [await unfinished(int(address.rpartition(":")[2]), 1000 << 10) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert (await http.post(CHAT, content=chat(photo(500 << 10)))).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(
                [asyncio.create_task(reader.readline()) for reader, _ in held], return_when="FIRST_COMPLETED"
            )
        first, second = [reader for reader, _ in held]
        body = await (first if first._buffer else second).read(500)
        assert b"too slowly" in body
        for _, writer in held:
            writer.transport.abort()


async def test_a_hundred_hostile_clients_take_bounded_memory(
    seeing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client sends a body of the largest size in pieces, but never its end. Together these are 7 GiB."""
    most, piece = 64 << 20, random.randbytes(1 << 20)
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", most)

    async def hostile(port: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        answered, sent = asyncio.create_task(reader.readline()), 0
        try:
            while not answered.done() and sent < largest_body(8) - len(piece):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                sent += len(piece)
            return (await answered).decode()
        finally:
            answered.cancel()
            writer.transport.abort()

    before = most_resident = resident()
    app = app_over(pool(), seeing)
    async with serving(app, ConnectionLimits()) as address, httpx.AsyncClient(base_url=address) as http:
        running = {asyncio.create_task(hostile(int(address.rpartition(":")[2]))) for _ in range(100)}
        while len(running) > 50:
            done, running = await asyncio.wait(running, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            assert done and {one.result() for one in done} == {"HTTP/1.1 503 Service Unavailable\r\n"}
            most_resident = max(most_resident, resident())
        assert most_resident - before < 8 * most
        async with asyncio.timeout(PATIENCE_S):  # a new body takes the place of one that stands still
            while (await http.post(CHAT, content=chat(photo(5000)))).status_code == 503:
                await asyncio.sleep(0.05)
        for one in running:
            one.cancel()
        await asyncio.wait(running)
        async with asyncio.timeout(PATIENCE_S):
            while (await http.post(CHAT, content=chat(photo(20 << 20)))).status_code == 503:
                await asyncio.sleep(0.05)


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

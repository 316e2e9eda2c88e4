"""Compressed bodies are unpacked on every route, within the bounds of plain ones; large ones off the event loop."""

import asyncio
import json
import random
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.errors import BadRequest
from frontend.server import bodies
from frontend.server.bodies import CODINGS, FEW_BYTES, MAX_FRAMES, SLICE, ZSTD_WINDOW_LOG
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from tests.checkpoints import VOCAB
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.kept.harness import keeping
from tests.frontend.serving import http_client
from tests.patience import PATIENCE_S

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMITS = m.Limits(max_seq_len=4096, vocab_size=VOCAB, eos_token_ids=())
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1}, "/v1/chat/completions": MESSAGES, "/v1/messages": MESSAGES,
    "/v1/responses": {"input": "hi", "max_output_tokens": 1}, "/api/chat": MESSAGES, "/api/show": {},
    "/completion": {"prompt": "hi", "n_predict": 1}, "/tokenize": {"content": "hi"}, "/generate": {"text": "hi"},
    "/v1/messages/count_tokens": MESSAGES, "/v1/responses/input_tokens": {"input": "hi"},
}  # fmt: skip


def deflated(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: deflated(data, 16 + zlib.MAX_WBITS), "zstd": zstd.compress,
    "deflate": lambda data: deflated(data, zlib.MAX_WBITS),
}  # fmt: skip


def pool() -> FakePool:
    return FakePool(sending([104]), welcome=m.Welcome(1, 1, 4711, MODEL, "", LIMITS))


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def unpacked(data: bytes, coding: str, size: int = 1 << 16) -> list[bytes]:
    return [one async for one in CODINGS[coding].unpacked(pieces(data, size))]


@pytest.mark.parametrize("coding", PACK)
async def test_all_routes_take_compressed_bodies(tokenizer: Tokenizer, coding: str) -> None:
    async with http_client(pool(), tokenizer) as http:
        for route, body in ROUTES.items():
            plain = json.dumps(body | {"model": MODEL}).encode()
            packed = PACK[coding](plain)
            taken = [
                await http.post(route, content=packed, headers={"Content-Encoding": name})
                for name in (coding, coding.upper())
            ]
            taken.append(await http.post(route, content=plain, headers={"Content-Encoding": "identity"}))
            assert [one.status_code for one in taken] == [200, 200, 200], (route, taken[0].text)


async def test_unknown_codings_are_refused_by_name(tokenizer: Tokenizer) -> None:
    async with http_client(pool(), tokenizer) as http:
        for name in ("br", "gzip, zstd", "aws-chunked", "gz"):
            answer = await http.post("/v1/completions", content=b"{}", headers={"Content-Encoding": name})
            assert answer.status_code == 415
            assert "`Content-Encoding`" in answer.text and name in answer.text and "zstd" in answer.text


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
async def test_bodies_are_unpacked_however_they_are_cut(coding: str, size: int) -> None:
    data = random.Random(5).randbytes(3000) + bytes(5000) + b"end"
    frames = PACK[coding](data) + PACK[coding](b"") + PACK[coding](data[::-1])
    assert b"".join(await unpacked(frames, coding, size)) == data + data[::-1]


@pytest.mark.parametrize("coding", PACK)
async def test_large_bodies_are_unpacked_in_slices_off_the_event_loop(
    coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[tuple[bool, int]] = []
    step = bodies._Unpacking.step

    def noted(self: Any, most: int) -> bytes:
        made = step(self, most)
        where.append((threading.current_thread() is threading.main_thread(), len(made)))
        return made

    monkeypatch.setattr(bodies._Unpacking, "step", noted)
    data = bytes(5 * SLICE + 17)
    assert b"".join(await unpacked(PACK[coding](data), coding)) == data
    assert sum(made for here, made in where if here) == FEW_BYTES
    assert max(made for _, made in where) == SLICE


@pytest.mark.parametrize("coding", PACK)
async def test_bomb_is_refused_with_little_memory(
    tokenizer: Tokenizer, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3 << 20
    bomb, made = PACK[coding](bytes(64 << 20)), 0
    step = bodies._Unpacking.step

    def counted(self: Any, most: int) -> bytes:
        nonlocal made
        data = step(self, most)
        made += len(data)
        return data

    monkeypatch.setattr(bodies._Unpacking, "step", counted)
    async with http_client(pool(), tokenizer, max_body_bytes=most) as http:
        refused = await http.post("/v1/completions", content=bomb, headers={"Content-Encoding": coding})
        assert refused.status_code == 413 and "--max-body-bytes" in refused.text
        assert made <= most + SLICE
        body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode().ljust(most)
        taken = await http.post("/v1/completions", content=PACK[coding](body), headers={"Content-Encoding": coding})
        assert taken.status_code == 200, taken.text


@pytest.mark.parametrize("coding", PACK)
async def test_bodies_that_are_damaged_or_cut_off_are_refused(tokenizer: Tokenizer, coding: str) -> None:
    packed = PACK[coding](json.dumps({"prompt": "hi" * 99, "max_tokens": 1}).encode())
    async with http_client(pool(), tokenizer) as http:
        for wrong in (packed[:-1], packed[:5], b"{}" + packed, packed + b"{}", packed + b"\0" * 9, b'{"prompt": "hi"}'):
            answer = await http.post("/v1/completions", content=wrong, headers={"Content-Encoding": coding})
            assert answer.status_code == 400 and f"`Content-Encoding`: the body is no {coding}" in answer.text


async def test_frames_without_content_and_large_windows_are_bounded() -> None:
    for coding in PACK:
        with pytest.raises(BadRequest, match=f"{MAX_FRAMES} frames"):
            await unpacked(PACK[coding](b"") * (MAX_FRAMES + 1), coding)
        assert not b"".join(await unpacked(PACK[coding](b"") * MAX_FRAMES, coding))
    options = {zstd.CompressionParameter.window_log: ZSTD_WINDOW_LOG + 1}
    packer = zstd.ZstdCompressor(options=options)
    frame = packer.compress(bytes(1000)) + packer.flush()
    with pytest.raises(BadRequest, match="zstd"):
        await unpacked(frame, "zstd")


async def test_unpacked_bytes_are_counted_with_those_of_all_bodies(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's unfinished bodies count with what they have become, and leave room for others when they have ended."""
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 12 << 20)
    monkeypatch.setattr(bodies, "GRACE_S", PATIENCE_S)
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode().ljust(3 << 20)
    packed, proceed, began = PACK["gzip"](body), asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield packed[:-8]
        began.set()
        await proceed.wait()
        yield packed[-8:]

    async def sent(content: Any) -> httpx.Response:
        return await http.post("/v1/completions", content=content, headers={"Content-Encoding": "gzip"})

    async with http_client(pool(), tokenizer) as http:
        first = asyncio.create_task(sent(slow()))
        await began.wait()
        while (refused := await sent(PACK["gzip"](body.ljust(6 << 20)))).status_code != 503:
            await asyncio.sleep(0.01)  # until the server has unpacked the first one
        assert "the bodies of all requests" in refused.text
        proceed.set()
        assert (await first).status_code == 200
        assert (await sent(PACK["gzip"](body.ljust(6 << 20)))).status_code == 200


async def test_uploaded_files_may_be_compressed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    line = b'{"custom_id": "a"}\n'
    form = (
        b'--xyzw\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyzw\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + line * 9999 + b"\r\n--xyzw--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=xyzw", "Content-Encoding": "zstd"}
    async with (
        keeping(pool(), tokenizer, tmp_path / "answers.db", max_file_bytes=300_000) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        made = await http.post("/v1/files", content=PACK["zstd"](form), headers=headers)
        assert made.status_code == 200, made.text
        assert (await http.get(f"/v1/files/{made.json()['id']}/content")).content == line * 9999
        bomb = await http.post("/v1/files", content=PACK["zstd"](form.replace(line, line * 2)), headers=headers)
        assert bomb.status_code == 413 and "--max-file-bytes" in bomb.text
        other = await http.post("/v1/files", content=form, headers=headers | {"Content-Encoding": "br"})
        assert other.status_code == 415

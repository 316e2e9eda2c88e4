"""WebSocket mode of /v1/responses: OpenAI's SDK, a client of frames, and clients that do what they may not."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.resources.responses.responses import AsyncResponsesConnection
from starlette.applications import Starlette
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from frontend.app_state import AppState
from frontend.routes import responses_socket
from frontend.server.bodies import Remembered
from frontend.server.http_protocol import ConnectionLimits
from frontend.server.websocket import WebSocket
from tests.fakes import FakePool
from tests.frontend.api.scripted import openai_sdk
from tests.frontend.kept.harness import Held
from tests.frontend.serving import app_over, serving, until
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S

ROOMY = ConnectionLimits(connections=50)
ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 500, "store": False}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
HELLO = {"type": "response.create", "input": "Hello", **ASKED}


@dataclass
class Served:
    url: str
    app: Starlette
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"

    @property
    def state(self) -> AppState:
        routes = [route for route in self.app.routes if getattr(route, "path", "") == "/v1/responses"]
        return routes[0].endpoint.args[1]  # type: ignore[attr-defined, no-any-return]

    @asynccontextmanager
    async def socket(self, **more: Any) -> AsyncIterator["Socket"]:
        async with connect(self.address, compression=None, max_size=None, **more) as wire:
            yield Socket(wire)


@dataclass
class Socket:
    wire: ClientConnection

    async def send(self, **fields: Any) -> None:
        await self.wire.send(json.dumps(fields))

    async def event(self) -> dict[str, Any]:
        text = await asyncio.wait_for(self.wire.recv(), PATIENCE_S)
        return dict(json.loads(text))

    async def until(self, *kinds: str) -> dict[str, Any]:
        while (event := await self.event())["type"] not in kinds:
            pass
        return event

    async def turn(self, **fields: Any) -> dict[str, Any]:
        await self.send(**HELLO | fields)
        return await self.until(*ENDS)

    async def closed(self) -> tuple[int, str]:
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await self.wire.recv()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason


@asynccontextmanager
async def served(
    pool: FakePool, tokenizer: Any, limits: ConnectionLimits = ROOMY, **config: Any
) -> AsyncIterator[Served]:
    app, refused = app_over(pool, tokenizer, **config), Counter[str]()
    async with serving(app, limits, lambda code: refused.update([code])) as url:
        yield Served(url, app, refused)


async def test_sdk_has_the_events_and_the_chain_that_http_has(qwen: Model) -> None:
    qwen.says = ["One", "Two", "Three", "One", "Two"]
    async with served(qwen.pool, qwen.tokenizer) as it, openai_sdk(it.url) as sdk:
        async with sdk.responses.connect() as connection:
            first = await _turn(connection, input="A")
            second = await _turn(connection, input="B", previous_response_id=first.response.id)
            third = await _turn(connection, input=[{"role": "user", "content": "C"}], stream_id="stream-2",
                                previous_response_id=second.response.id)  # fmt: skip
        assert second.response.previous_response_id == first.response.id and third.stream_id == "stream-2"
        whole: list[Any] = [{"role": "user", "content": "A"}, *first.response.output, {"role": "user", "content": "B"}]
        await sdk.responses.create(input="A", **ASKED)
        await sdk.responses.create(input=whole, **ASKED)
    prompts = [one.prompt for one in qwen.pool.submitted]
    assert prompts[:2] == prompts[3:]
    assert qwen.prompts[2].count("Two") == 1 and qwen.prompts[2].count("One") == 1


async def _turn(connection: AsyncResponsesConnection, **fields: Any) -> Any:
    await connection.response.create(**ASKED, **fields)
    async for event in connection:
        if event.type in ENDS:
            return event


@pytest.mark.parametrize("more", [{}, {"stream_id": "a.b"}])
async def test_messages_are_the_data_of_the_events_of_a_stream(qwen: Model, more: dict[str, str]) -> None:
    qwen.says = ['Say "hi"\n\n' * 9] * 2

    def settled(text: str) -> Any:
        event = json.loads(text)
        for name in ("item_id", "stream_id"):
            event.pop(name, None)
        for part in ("response", "item"):
            for name in ("id", "created_at", "completed_at", "seed"):
                event.get(part, {}).pop(name, None)
        for item in event.get("response", {}).get("output", ()):
            item.pop("id")
        return event

    async with served(qwen.pool, qwen.tokenizer) as it:
        async with it.socket() as socket:
            await socket.send(**HELLO, **more)
            messages = []
            while not messages or json.loads(messages[-1])["type"] not in ENDS:
                messages.append(str(await socket.wire.recv()))
        async with httpx.AsyncClient() as http:
            body = {**HELLO, "stream": True}
            del body["type"]
            stream = (await http.post(f"{it.url}/v1/responses", json=body)).text
    data = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    assert len(data) > 20 and list(map(settled, messages)) == list(map(settled, data))
    assert all(json.loads(text).get("stream_id") == more.get("stream_id") for text in messages)


async def test_lanes_run_beside_each_other_and_each_in_order(qwen: Model) -> None:
    held = Held(qwen.tokenizer, "abcd")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        for stream in ("a", "b", "a", None):
            await socket.send(**HELLO, **({} if stream is None else {"stream_id": stream}))
        await until(lambda: len(held.streams) == 3)
        held.finish()
        ends = [(await socket.until(*ENDS)).get("stream_id") for _ in range(4)]
        assert len(held.streams) == 4 and ends[-1] == "a" and set(ends[:3]) == {"a", "b", None}


async def test_lane_forks_the_response_of_another_one(qwen: Model) -> None:
    qwen.says = ["One", "Two", "Three"]
    async with served(qwen.pool, qwen.tokenizer) as it, it.socket() as socket:
        first = (await socket.turn(stream_id="a"))["response"]["id"]
        assert (await socket.turn(stream_id="b", previous_response_id=first))["type"] == "response.completed"
        assert (await socket.turn(stream_id="a", previous_response_id=first))["type"] == "response.completed"
        gone = await socket.turn(stream_id="a", previous_response_id=first)
    assert gone["error"]["code"] == "previous_response_not_found", "a stream remembers its latest response"


@pytest.mark.parametrize("wrong", [{"input": 5}, {"background": True}])
async def test_response_whose_next_turn_fails_is_forgotten(qwen: Model, wrong: dict[str, Any]) -> None:
    qwen.says = ["One"]
    async with served(qwen.pool, qwen.tokenizer) as it, it.socket() as socket:
        first = (await socket.turn())["response"]["id"]
        assert (await socket.turn(previous_response_id=first, **wrong))["status"] == 400
        gone = await socket.turn(previous_response_id=first)
        assert gone["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("text", ["", "Hello"])
async def test_warming_up_computes_the_prompt_and_shows_no_output(qwen: Model, text: str) -> None:
    qwen.says = ["x", "One"]
    given: list[Any] = [{"role": "user", "content": text}] if text else []
    async with served(qwen.pool, qwen.tokenizer) as it, it.socket() as socket:
        await socket.send(**HELLO | {"input": given, "instructions": "Be short.", "generate": False, "min_tokens": 5})
        events = [await socket.event() for _ in range(3)]
        assert [event["type"] for event in events] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == [0, 1, 2]
        warm = events[-1]["response"]
        assert warm["output"] == [] and warm["usage"]["output_tokens"] == 0 and warm["max_output_tokens"] == 500
        assert qwen.pool.submitted[0].sampling.max_tokens == 1
        await socket.turn(input="B", instructions="Be short.", previous_response_id=warm["id"])
    assert "Be short." in qwen.prompts[0] and qwen.prompts[0].count("Hello") == bool(text)
    assert qwen.prompts[1].count("<|im_start|>user") == 1 and "B" in qwen.prompts[1]


@pytest.mark.parametrize("stored", [False, True])
async def test_with_a_store_a_chain_goes_on_from_memory_or_from_the_store(
    qwen: Model, tmp_path: Path, stored: bool
) -> None:
    qwen.says = ["One", "Two", "Three"]
    async with served(qwen.pool, qwen.tokenizer, store=str(tmp_path / "state/answers.db")) as it:
        async with it.socket() as socket:
            first = (await socket.turn(store=stored))["response"]
            second = (await socket.turn(store=stored, previous_response_id=first["id"]))["response"]
        assert second["previous_response_id"] == first["id"] and second["store"] is stored
        async with it.socket() as socket:
            end = await socket.turn(previous_response_id=second["id"])
        if stored:
            assert end["type"] == "response.completed" and "Two" in qwen.prompts[2] and "One" in qwen.prompts[2]
        else:
            assert (end["status"], end["error"]["code"]) == (400, "previous_response_not_found")
    assert "One" in qwen.prompts[1]


WRONG: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "kind": ({"type": "session.update"}, 400, "unknown_event", "type"),
    "no-kind": ({"type": None}, 400, "unknown_event", "type"),
    "unknown-id": ({"previous_response_id": "resp_1"}, 400, "previous_response_not_found", "previous_response_id"),
    "stream-id": ({"stream_id": ""}, 400, "invalid_stream_id", "stream_id"),
    "stream-id-that-is-a-number": ({"stream_id": 5}, 400, "invalid_stream_id", "stream_id"),
    "background": ({"background": True}, 400, "out_of_range", "background"),
    "stream": ({"stream": False}, 400, "out_of_range", "stream"),
    "generate": ({"generate": "no"}, 400, "wrong_type", "generate"),
    "input": ({"input": 5}, 400, "", "input"),
    "model": ({"model": "other"}, 404, "model_not_found", "model"),
}  # fmt: skip


async def test_what_is_wrong_is_refused_by_name_and_the_connection_goes_on(qwen: Model) -> None:
    qwen.says = ["One"]
    async with served(qwen.pool, qwen.tokenizer) as it, it.socket() as socket:
        for name, (fields, status, code, param) in WRONG.items():
            event = await socket.turn(**fields)
            error = event["error"]
            assert (event["type"], event["status"], error["param"]) == ("error", status, param), name
            assert not code or error["code"] == code, name
        for text in ("[1]", "{", "5", '{"type": "response.create"}'):
            await socket.wire.send(text)
            assert (await socket.event())["status"] == 400
        await socket.send(type="response.processed", response_id="a")
        assert (await socket.turn())["type"] == "response.completed"
        assert not it.state.bodies.held
    assert len(qwen.pool.submitted) == 1


async def test_connection_has_so_many_lanes_and_waiting_requests(qwen: Model) -> None:
    held = Held(qwen.tokenizer, "ab")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        for number in range(33):
            await socket.send(**HELLO, stream_id=f"stream-{number}")
        refused = await socket.until("error")
        assert (refused["stream_id"], refused["error"]["code"]) == ("stream-32", "websocket_stream_limit_reached")
        await until(lambda: len(held.streams) == 16)
        for _ in range(17):
            await socket.send(**HELLO)
        assert (await socket.until("error"))["error"]["code"] == "queue_full"
        held.finish()
        for _ in range(48):
            assert (await socket.until(*ENDS))["type"] == "response.completed"
        assert not it.state.bodies.held


async def test_keys_are_checked_before_the_upgrade_and_at_each_request(qwen: Model, tmp_path: Path) -> None:
    qwen.says = ["One"]
    keys = tmp_path / "keys"
    keys.write_text("secret anna\n")
    keys.chmod(0o600)
    async with served(qwen.pool, qwen.tokenizer, api_keys=str(keys)) as it:
        for headers in ({}, {"Authorization": "Bearer other"}):
            with pytest.raises(InvalidStatus) as refused:
                async with it.socket(additional_headers=headers):
                    raise AssertionError("opened")
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
        async with it.socket(additional_headers={"Authorization": "Bearer secret"}) as socket:
            assert (await socket.turn())["type"] == "response.completed"
            keys.write_text("another-key anna\n")
            assert (await socket.turn())["status"] == 401


@pytest.mark.parametrize(
    ("origin", "origins", "opens"),
    [
        ("https://evil.example", "", False),
        ("https://app.example", "https://app.example", True),
        ("https://evil.example", "https://app.example", False),
    ],
)
async def test_foreign_page_opens_no_socket(qwen: Model, origin: Any, origins: str, opens: bool) -> None:
    qwen.says = ["One"]
    async with served(qwen.pool, qwen.tokenizer, cors_origins=origins) as it:
        if opens:
            async with it.socket(origin=origin) as socket:
                assert (await socket.turn())["type"] == "response.completed"
            return
        with pytest.raises(InvalidStatus) as refused:
            async with it.socket(origin=origin):
                raise AssertionError("opened")
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body)["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 426),
        ({"Upgrade": "h2c"}, 426),
        ({"Upgrade": "websocket"}, 426),
        ({"Upgrade": "websocket", "Sec-WebSocket-Version": "8"}, 426),
        ({"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAA"}, 400),
        ({"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}, 400),
    ],
)
async def test_handshake_that_is_none_is_refused(qwen: Model, headers: dict[str, str], status: int) -> None:
    async with served(qwen.pool, qwen.tokenizer) as it, httpx.AsyncClient() as http:
        answer = await http.get(f"{it.url}/v1/responses", headers={"Connection": "Upgrade", **headers})
        assert answer.status_code == status and answer.json()["error"]["message"]
        assert answer.headers.get("sec-websocket-version") == ("13" if status == 426 else None)
        assert answer.headers.get("upgrade") == ("websocket" if status == 426 else None)
        assert (await http.get(f"{it.url}/health", headers={"Connection": "Upgrade", **headers})).status_code == 200


@pytest.mark.parametrize("more", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /he"])
async def test_handshake_with_more_of_http_behind_it_is_refused(qwen: Model, more: bytes) -> None:
    async with served(qwen.pool, qwen.tokenizer) as it:
        reader, writer = await asyncio.open_connection(*it.url.removeprefix("http://").split(":"))
        writer.write(HANDSHAKE + more)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()


async def test_client_that_leaves_aborts_its_answers(qwen: Model) -> None:
    held = Held(qwen.tokenizer, "abcd")
    async with served(held.pool, qwen.tokenizer) as it:
        for leave in ("close", "abort"):
            async with it.socket() as socket:
                count = len(held.streams)
                await socket.send(**HELLO)
                await socket.send(**HELLO)
                await until(lambda count=count: len(held.streams) == count + 1)
                if leave == "abort":
                    socket.wire.transport.abort()
            await until(lambda count=count: len(held.pool.aborted) == count + 1)
        assert len(held.streams) == 2, "what waits is not begun"
        await until(lambda: not it.state.bodies.held)


async def test_client_that_does_not_read_is_cut_off(qwen: Model) -> None:
    qwen.says = ["word " * 1500] * 400
    limits = ConnectionLimits(connections=50, write_s=0.6)
    async with served(qwen.pool, qwen.tokenizer, limits) as it, it.socket(max_queue=1) as socket:
        for _ in range(400):
            if it.refused:
                break
            await socket.send(**HELLO | {"max_output_tokens": 7500})
            await asyncio.sleep(0.01)
        await until(lambda: it.refused)
        assert it.refused == {"write_timeout": 1}
        socket.wire.transport.abort()


def frame(first: int, payload: bytes, *, masked: bool = True) -> bytes:
    """first: the first byte of a frame: FIN, reserved bits and the kind"""
    return bytes([first, masked << 7 | len(payload)]) + bytes(4 * masked) + payload


@pytest.mark.parametrize("cut", [1, 2, 9, 1000])
async def test_messages_that_come_before_they_are_read_stay_apart(cut: int) -> None:
    class Transport:
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

        def close(self) -> None: ...
        def abort(self) -> None: ...

        def is_closing(self) -> bool:
            return False

    class Flow:
        write_paused, reading = False, True

        async def drain(self) -> None: ...

        def pause_reading(self) -> None:
            self.reading = False

        def resume_reading(self) -> None:
            self.reading = True

    transport, flow = Transport(), Flow()
    socket = WebSocket(transport, flow, str)
    said = [b"first", b"second " * 15, b"", b"third"]
    frames = [frame(0x81, said[0]), frame(0x01, said[1][:50]), frame(0x89, b"a"), frame(0x80, said[1][50:])]
    frames += [frame(0x89, b"b"), frame(0x81, said[2]), frame(0x81, said[3]), frame(0x88, b"\x03\xe8")]
    data = b"".join(frames)
    for at in range(0, len(data), cut):
        socket.feed(data[at : at + cut])
    assert not flow.reading, "no more is read than may wait"
    read = []
    while await socket.message():
        text, more = b"", True
        while more:
            piece = await socket.receive()
            text, more = text + piece["body"], piece["more_body"]
        read.append(text)
        await asyncio.sleep(0)
    assert read == said and socket.gone.is_set()
    assert transport.written.endswith(b"\x88\x02\x03\xe8") and b"\x8a\x01b" in transport.written


NO_FRAMES = {
    "binary": (frame(0x82, b"{}"), 1003),
    "no-utf8": (frame(0x81, b"\xff"), 1007),
    "continuation": (frame(0x80, b"{}"), 1002),
    "compressed": (frame(0xC1, b"{}"), 1002),
    "unmasked": (frame(0x81, b"{}", masked=False), 1002),
    "kind": (frame(0x83, b""), 1002),
    "close": (frame(0x88, b"\x00"), 1002),
    "ping-in-pieces": (frame(0x09, b"a"), 1002),
}


async def test_frames_that_are_none_close_the_connection(qwen: Model) -> None:
    async def code_for(it: Served, data: bytes) -> int:
        async with it.socket() as socket:
            socket.wire.transport.write(data)
            return (await socket.closed())[0]

    async with served(qwen.pool, qwen.tokenizer) as it:
        codes = await asyncio.gather(*[code_for(it, data) for data, _ in NO_FRAMES.values()])
    assert dict(zip(NO_FRAMES, codes, strict=True)) == {name: code for name, (_, code) in NO_FRAMES.items()}


async def test_too_large_message_is_refused_as_a_body_is(qwen: Model) -> None:
    qwen.says = ["One"]
    async with served(qwen.pool, qwen.tokenizer, max_body_bytes=100_000) as it:
        async with it.socket() as socket:
            await socket.send(**HELLO, user="a" * 200_000)
            assert (await socket.event())["error"]["code"] == "request_too_large"
            assert (await socket.closed())[0] == 1009
        async with it.socket() as socket:  # in fragments
            await socket.wire.send(piece for piece in [json.dumps(HELLO)[:-1], ', "user": "', "a" * 90_000, '"}'])
            assert (await socket.until(*ENDS))["type"] == "response.completed"
            await socket.wire.ping()
        await until(lambda: not it.state.bodies.held)


async def test_message_that_stands_still_and_client_that_is_silent_are_given_up(qwen: Model) -> None:
    limits = ConnectionLimits(connections=50, request_s=0.6, idle_s=0.3)
    async with served(qwen.pool, qwen.tokenizer, limits) as it:
        async with it.socket() as socket:
            socket.wire.transport.write(frame(0x01, b"{" * 100))
            assert (await socket.closed())[0] == 1008 and it.refused == {"request_timeout": 1}
        async with it.socket() as socket:
            assert await asyncio.wait_for(_pings(socket.wire), PATIENCE_S) == 3, "a client that answers is kept"
        reader, writer = await asyncio.open_connection(*it.url.removeprefix("http://").split(":"))
        writer.write(HANDSHAKE)
        data = b""
        with suppress(ConnectionResetError):
            data = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert not data or data.endswith(b"\x89\x00"), "one that does not is asked once, and given up"
        writer.close()


async def _pings(wire: ClientConnection) -> int:
    """Waits for three pings."""
    seen, arrived = 0, asyncio.Event()
    receive = wire.protocol.recv_frame

    def counting(arriving: Frame) -> None:
        nonlocal seen
        seen += arriving.opcode is Opcode.PING
        receive(arriving)
        if seen == 3:
            arrived.set()

    wire.protocol.recv_frame = counting  # type: ignore[method-assign]
    await arrived.wait()
    return seen


async def test_connection_ends_after_its_time_when_its_answers_have_ended(
    qwen: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[WebSocket] = []
    monkeypatch.setattr(WebSocket, "message", _noted(opened, WebSocket.message))
    held = Held(qwen.tokenizer, "abcd")
    async with served(held.pool, qwen.tokenizer) as it, it.socket() as socket:
        await socket.send(**HELLO)
        await until(lambda: held.streams)
        opened[0].stop(responses_socket.LIMIT)
        await socket.send(**HELLO)
        held.finish()
        assert (await socket.until(*ENDS))["type"] == "response.completed"
        limit = await socket.event()
        assert (limit["status"], limit["error"]["code"]) == (400, "websocket_connection_limit_reached")
        assert (await socket.closed())[0] == 1000
    assert len(held.streams) == 1


def _noted(sockets: list[WebSocket], message: Any) -> Any:
    async def noted(socket: WebSocket) -> bool:
        sockets.append(socket)
        return bool(await message(socket))

    return noted


async def test_server_that_stops_closes_when_answers_have_ended(qwen: Model) -> None:
    qwen.says = ["One"]
    opened: list[ClientConnection] = []
    async with served(qwen.pool, qwen.tokenizer) as it:
        opened.append(await connect(it.address))
        socket = Socket(opened[0])
        await socket.turn()
    assert (await socket.closed())[0] == 1001


async def test_request_and_connection_are_logged_with_their_outcomes(
    qwen: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    qwen.says = ["One"]
    async with served(qwen.pool, qwen.tokenizer, access_log="json") as it, it.socket() as socket:
        await socket.turn()
        await socket.turn(model="other")
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [(line["method"], line["status"], line["outcome"]) for line in lines] == [
        ("POST", 200, "finished"), ("POST", 404, "refused"), ("GET", 101, "finished"),
    ]  # fmt: skip
    assert len({line["request_id"] for line in lines}) == 3


def test_memory_is_bounded_and_the_largest_tenant_loses_its_oldest() -> None:
    memory = Remembered(100)
    first, second, third = memory.keep("a", b"x" * 40), memory.keep("a", b"y" * 40), memory.keep("b", b"z" * 30)
    assert (first.data, second.data, third.data) == (None, b"y" * 40, b"z" * 30)
    assert memory.keep("b", b"z" * 101).data is None and second.data and third.data
    memory.forget(second)
    memory.forget(first)
    assert memory.keep("c", b"x" * 70).data and third.data

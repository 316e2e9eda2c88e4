"""Sends requests outside the OpenAPI document: bytes that are not JSON, JSON that is no request, malformed HTTP."""

import json
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
POSTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
PATHS = (
    *POSTED, "/", "/web/", "/web/x", "/web/..%2fapp.py", "/web/%2e%2e/app.py", "/health", "/ready", "/stats",
    "/metrics", "/openapi.json", "/v1/models", "/v1/models/", "/v1/models/%00", "/v1/models/%ff%fe", "/nowhere",
    "/v1/responses/x", "//", "/v1/completions/", "/v1//completions", "/%", "/%zz", "/?a=%ff", "*", "http://other/stats",
)  # fmt: skip
METHODS = (
    "GET",
    "GET",
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "BREW",
)
Tally = Counter[tuple[str, int]]
SETTLED = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Answer:
    """An answer. status: 0 if the connection was closed without an answer"""

    status: int
    headers: dict[str, str]
    body: bytes


def exchange(url: str, sent: bytes, *, leave: bool = False) -> Answer:
    """Sends bytes and reads until the server closes the connection. Raises TimeoutError if it stays open.

    leave: shut the sending side down, which is necessary where the server may wait for more bytes.
    """
    there = urlsplit(url)
    with socket.create_connection((there.hostname, there.port), TIMEOUT_S) as wire:
        try:
            wire.sendall(sent)
            if leave:
                wire.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has already answered and closed
        received = b""
        try:
            while piece := wire.recv(1 << 16):
                received += piece
        except ConnectionResetError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split(" ")[1]) if first else 0, headers, body)


def checked(answer: Answer, label: object) -> Answer:
    """Checks that the answer is no server error.

    Every error must have an `error` body and, if the request was well-formed HTTP, an id.
    """
    assert answer.status < 500 or answer.status in (503, 504), (label, answer)
    if answer.status >= 400 and answer.body:
        assert json.loads(answer.body)["error"], (label, answer)
        assert "x-request-id" in answer.headers or answer.status in (400, 431), (label, answer)
    return answer


def request(method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close"]
    lines += [b"%s: %s" % header for header in headers]
    return b"\r\n".join([*lines, b"", body])


# bodies

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
NAMES = st.sampled_from([
    "model", "prompt", "messages", "max_tokens", "stream", "stop", "n", "logprobs", "echo", "seed", "logit_bias",
    "temperature", "top_k", "stream_options", "stream_format", "response_format", "tools", "system", "tokens",
    "chat_template_kwargs", "metadata", "structured_outputs", "tool_choice", "stop_token_ids", "input", "instructions",
    "text", "reasoning", "include", "max_output_tokens",
])  # fmt: skip
VALUES = st.sampled_from([
    b"1", b"-1", b"0", b"1e400", b"-1e400", b"1e-400", b"NaN", b"Infinity", b"9" * 400, b"-" + b"9" * 30, b"1.0", b"01",
    b'""', b'"a"', b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"\xed\xa0\x80"', b"null", b"true", b"[]", b"{}", b"[null]",
    b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500, b"[[[]]]", b'[""]', b"[0]", b"[1e2]", b'{"":""}',
    b'[{"role":"user","content":"a"}]', b'[{"role":"user","content":null}]', b'[{"role":{},"content":[]}]',
    b'[{"type":"reasoning","content":[]}]', b'{"format":{"type":"json_object"}}', b'{"effort":"none","summary":"auto"}',
    b'{"type":"json_schema","json_schema":{"schema":{"$ref":"#"}}}', b'{"type":"object"}', b'{"regex":"(a*)*b"}',
    b'"' + b"a" * 5000 + b'"', b'"\xf0\x9f\x91\xa9\xe2\x80\x8d"', b'"<|im_start|>"', b'"openai"', b'"events"', b'"m"',
])  # fmt: skip
MEMBERS = st.lists(st.tuples(NAMES, VALUES), max_size=2)
VALID_MEMBERS = {
    "/v1/completions": b'"model":"m","prompt":"a","max_tokens":2',
    "/v1/chat/completions": b'"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":2',
    "/v1/responses": b'"model":"m","input":"a","max_output_tokens":2',
    "/v1/messages": b'"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":2',
}


def members(path: str, extra: list[tuple[str, bytes]]) -> bytes:
    """Returns a valid request with additional members: names may repeat, and values may be invalid JSON."""
    rest = [b'"%s":%s' % (name.encode(), value) for name, value in extra]
    return b"{%s}" % b",".join([*([VALID_MEMBERS[path]] if path in VALID_MEMBERS else []), *rest])


TYPES = st.sampled_from([
    b"application/json", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x",
    b"application/json; charset=utf-16", b"\xff", b"", b"application/xml",
])  # fmt: skip


def fuzz_bodies(url: str, examples: int, *, deterministic: bool = False) -> Tally:
    """Posts bodies of every kind, whole and in chunks, with every content type. deterministic: same examples always"""
    tally: Tally = Counter()

    @settings(SETTLED, max_examples=examples, derandomize=deterministic)
    @given(st.sampled_from(POSTED), st.binary(max_size=200) | JSON, MEMBERS, TYPES, st.integers(0, 3))
    def post(path: str, data: bytes, extra: list[tuple[str, bytes]], kind: bytes, variant: int) -> None:
        body = data if variant == 0 else members(path, extra)
        headers = [(b"Content-Type", kind), (b"Content-Length", b"%d" % len(body))]
        if variant == 2:
            headers[1] = (b"Transfer-Encoding", b"chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
            body += b"0\r\n\r\n"
        if variant == 3:
            body = body[:-1]  # the last byte is missing
        answer = checked(exchange(url, request("POST", path, headers, body), leave=variant == 3), (path, body, variant))
        tally["bodies", answer.status] += 1
        assert variant == 3 or answer.status in (200, 400, 404, 415, 422), (path, body, answer)

    post()
    return tally


# methods, paths and headers

TOKEN = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
LENGTHS = {b"content-length", b"transfer-encoding", b"upgrade"}  # headers that can make a server wait for more bytes
HEADER = st.tuples(
    TOKEN | st.sampled_from([
        b"Content-Length", b"Transfer-Encoding", b"Expect", b"Authorization", b"X-Api-Key", b"X-Request-Id", b"Upgrade",
        b"Connection", b"Range", b"Accept", b"Accept-Encoding", b"If-None-Match", b"Cookie", b"anthropic-version",
        b"Content-Encoding", b"Origin", b"X-HTTP-Method-Override",
    ]),
    st.text("aZ09 ,;:=/*\t\xe9", max_size=20).map(lambda text: text.encode("latin-1")) | st.sampled_from([
        b"0", b"-1", b"5", b"99999999999999999999", b"chunked", b"gzip, chunked", b"100-continue", b"Bearer \xff",
        b"websocket", b"close", b"keep-alive", b"bytes=0-1", b"gzip", b"a" * 3000, b"req_1", b"2023-06-01",
    ]),
)  # fmt: skip


def fuzz_http(url: str, examples: int, *, deterministic: bool = False) -> Tally:
    """Sends random methods, paths and headers, and bytes that are not HTTP."""
    tally: Tally = Counter()

    @settings(SETTLED, max_examples=examples, derandomize=deterministic)
    @given(st.sampled_from(METHODS), st.sampled_from(PATHS), st.lists(HEADER, max_size=4), st.binary(max_size=50))
    def send_request(method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        waits = method == "CONNECT" or bool(LENGTHS & {name.lower() for name, _ in headers})
        answer = checked(
            exchange(url, request(method, path, headers, body), leave=waits), (method, path, headers, body)
        )
        tally["http", answer.status] += 1

    @settings(SETTLED, max_examples=max(1, examples // 4), derandomize=deterministic)
    @given(st.binary(min_size=1, max_size=300), st.integers(0, 40))
    def send_noise(noise: bytes, cut: int) -> None:
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"[:cut]
        tally["noise", checked(exchange(url, begun + noise, leave=True), noise).status] += 1

    send_request()
    send_noise()
    return tally


def fuzz_sizes(url: str) -> Tally:
    """Sends requests that are too long, too deep or too large, and checks that the server survives them."""
    tally: Tally = Counter()
    huge = b'{"model":"m","prompt":"%s"}' % (b"a" * (9 << 20))
    deep = b'{"model":"m","metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    long = [(b"X-Long", b"a" * 60_000)] * 4
    oversized: dict[str, Callable[[], bytes]] = {
        "huge": lambda: request("POST", "/v1/completions", [(b"Content-Length", b"%d" % len(huge))], huge),
        "deep": lambda: request("POST", "/v1/completions", [(b"Content-Length", b"%d" % len(deep))], deep),
        "long address": lambda: request("GET", "/v1/models/" + "a" * 60_000, [], b""),
        "long query": lambda: request("GET", "/stats?" + "a=b&" * 15_000, [], b""),
        "long headers": lambda: request("GET", "/stats", long, b""),
        "many headers": lambda: request("GET", "/stats", [(b"X-%d" % i, b"a") for i in range(5000)], b""),
    }
    for name, build in oversized.items():
        tally[name, checked(exchange(url, build()), name).status] += 1
    assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
    return tally

"""Makes HTTP requests with malformed heads, random splits, pipelining, chunked bodies, trailers and upgrades.

Half of the inputs are oddly written but well-formed, and each of their requests must be answered.
"""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from tests.fuzz.fuzzer import HANG_S, Attempt, Failure, Fuzzer, Input
from tests.fuzz.replies import Unfinished, replies
from tests.fuzz.watch import Watch

QUIET_S = 0.02
TINY = b'{"model":"m","prompt":"a","max_tokens":1}'
SOUND_PATHS = ("/health", "/ready", "/v1/models", "/stats?a=b", "/nowhere", "/openapi.json")
ODD_PATHS = (
    "*",
    "//",
    "/%zz",
    "/%00",
    "http://other/stats",
    "/" + "a" * 9000,
    "",
    " ",
    "/\x7f",
    "/\xff",
    "/v1/models#x",
)
HOSTS = ("x", "", "localhost:8000", "[::1]:80", "a" * 300, "x, y", "x\ty", "\xe9", "x:99999999", "@", "127.0.0.1:x")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get", "G" * 300, "PRI", "\x00", "")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1 ", "http/1.1", "", "HTTP/1.10")
ENDS = ("\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "\0\r\n")
FIELDS = (
    "Content-Length: 0", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999",
    "Content-Length: +3", "Content-Length: 3, 3", "Content-Length : 3", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: \tchunked",
    "Upgrade: websocket", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", "Connection: Upgrade", "Connection: close",
    "Connection: keep-alive, upgrade", "Expect: 100-continue", "Expect: x", "Trailer: X-A", "TE: trailers",
    "X-A: " + "a" * 5000, "X-A:", ": a", "X-A", " folded: a", "X-A: a\0b", "X-A: \xff", "X-Request-Id: \xe9\x01",
    "Authorization: Bearer \xff", "Accept-Encoding: gzip;q=x", "Range: bytes=0-", "Cookie: " + "a=b;" * 500,
    "Origin: null", "Access-Control-Request-Method: POST", "X-Forwarded-For: " + "1.1.1.1," * 200,
    "traceparent: 00-" + "f" * 32 + "-" + "0" * 16 + "-01", "traceparent: x", "Content-Type: \xff",
    "Content-Encoding: br", "Content-Encoding: gzip", "Content-Encoding: zstd", "Content-Encoding: deflate, gzip",
)  # fmt: skip


def make(rng: random.Random) -> Input:
    sound = rng.random() < 0.5
    count = rng.choice([1, 1, 1, 2, 3, 8])
    requests = [_sound(rng, last=i == count - 1) if sound else _odd(rng) for i in range(count)]
    data = b"".join(requests)
    if not sound and rng.random() < 0.3:
        data = _mutated(rng, data)
    cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.choice([0, 0, 1, 3, 20]))))
    pieces = [data[start:end].decode("latin-1") for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return {"pieces": pieces, "answers": count if sound else 0}


def _sound(rng: random.Random, last: bool) -> bytes:
    """Makes a well-formed request. After its answer, the connection must stay open unless it is the last request."""
    lines = ["Host: " + rng.choice(["x", "localhost:8000", "[::1]:80"])]
    lines += [
        f"X-{rng.randrange(99)}:{' ' * rng.randrange(4)}{'a' * rng.randrange(300)}" for _ in range(rng.randrange(4))
    ]
    if last:
        lines.append("Connection: close")
    if rng.random() < 0.5:
        return _joined([f"GET {rng.choice(SOUND_PATHS)} HTTP/1.1", *lines])
    lines.append("Content-Type: application/json")
    body = TINY
    if rng.random() < 0.6:
        lines.append(rng.choice(["Transfer-Encoding: chunked", "transfer-encoding:Chunked"]))
        body = _chunked(rng, TINY, rng.choice(["", "", ";a=b", ';a="b c"', ";" + "x" * 50]), rng.randrange(3))
    else:
        lines.append(f"Content-Length: {len(TINY)}")
    rng.shuffle(lines)
    return _joined(["POST /v1/completions HTTP/1.1", *lines]) + body


def _odd(rng: random.Random) -> bytes:
    path = rng.choice([*SOUND_PATHS, *ODD_PATHS, "/v1/completions"])
    lines = [f"{rng.choice(METHODS)} {path} {rng.choice(VERSIONS)}"]
    lines += [f"Host: {host}" for host in rng.choices(HOSTS, k=rng.choice([0, 1, 1, 1, 2]))]
    lines += rng.choices(FIELDS, k=rng.choice([0, 1, 2, 3, 8]))
    if rng.random() < 0.02:
        lines += [f"X-{i}: a" for i in range(2000)]
    ends = "\r\n" if rng.random() < 0.7 else rng.choice(ENDS)
    head = _joined(lines, ends)
    bodies = [b"", TINY, rng.randbytes(rng.randrange(100)), _odd_chunks(rng)]
    return head + rng.choice(bodies)


def _joined(lines: list[str], end: str = "\r\n") -> bytes:
    return (end.join(lines) + end + end).encode("latin-1")


def _chunked(rng: random.Random, body: bytes, extension: str, trailers: int) -> bytes:
    out, at = b"", 0
    while at < len(body):
        chunk = body[at : at + rng.randint(1, 20)]
        size = rng.choice(["%x", "%X", "0%x"]) % len(chunk)
        out += f"{size}{extension}\r\n".encode() + chunk + b"\r\n"
        at += len(chunk)
    return out + b"0\r\n" + b"".join(b"X-T%d: a\r\n" % i for i in range(trailers)) + b"\r\n"


def _odd_chunks(rng: random.Random) -> bytes:
    out = b""
    for _ in range(rng.randrange(6)):
        size = rng.choice(
            [
                "0",
                "-1",
                "5",
                "05",
                "0x5",
                "fffffffffffffffff",
                "7fffffffffffffff",
                "",
                " 5",
                "5 ",
                "g",
                "5;" + "x" * 3000,
            ]
        )
        out += size.encode() + rng.choice([b"\r\n", b"\n", b""]) + b"abcde" + rng.choice([b"\r\n", b"\n", b""])
    return out + rng.choice(
        [b"0\r\n\r\n", b"0\r\n", b"0\r\n" + b"X-T: " + b"a" * rng.choice([10, 90_000]) + b"\r\n\r\n", b""]
    )


def _mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(3):
            case 0:
                out[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del out[at : at + rng.randint(1, 9)]
            case _:
                out[at : at + 1] = rng.choice([b"\0", b"\n", b"\r", b" ", b":", b"\xff", b"\x80"])
    return bytes(out)


@contextmanager
def opened(watch: Watch) -> Iterator[Attempt]:
    there = urlsplit(watch.url)

    def attempt(input: Input) -> None:
        with socket.create_connection((str(there.hostname), there.port), HANG_S) as wire:
            statuses = _talk(wire, [piece.encode("latin-1") for piece in input["pieces"]], input["answers"])
        for status in statuses:
            if status >= 500 and status not in (501, 503, 504, 505):
                raise Failure(f"status {status}")
        if input["answers"] and len(statuses) < input["answers"]:
            raise Failure(f"{len(statuses)} answers to {input['answers']} sound requests: {statuses}")

    yield attempt


def _talk(wire: socket.socket, pieces: list[bytes], answers: int) -> list[int]:
    """Sends the pieces and returns the statuses of all replies. Raises Failure for bytes that are no reply."""
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received, open_, end = b"", True, time.monotonic() + HANG_S + 1
    try:
        for number, piece in enumerate(pieces):
            wire.sendall(piece)
            if number < 4:
                time.sleep(0.001)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has answered and closed the connection
    wire.settimeout(QUIET_S)
    while time.monotonic() < end:
        try:
            piece = wire.recv(1 << 16)
        except ConnectionResetError:
            piece = b""
        except TimeoutError:
            if open_ and _enough(received, answers):
                open_ = _left(wire)
            continue
        if not piece:
            return _statuses(received, cut=answers == 0)
        received += piece
    raise TimeoutError(f"the connection stays open after {received[:200]!r}")


def _enough(received: bytes, answers: int) -> bool:
    """Whether the client can leave, because it has received all answers completely."""
    try:
        return len(replies(received, to_head=not answers)) >= answers
    except Unfinished:
        return False


def _left(wire: socket.socket) -> bool:
    with suppress(OSError):
        wire.shutdown(socket.SHUT_WR)
    return False


def _statuses(received: bytes, cut: bool) -> list[int]:
    try:
        return [reply.status for reply in replies(received, to_head=cut)]
    except Unfinished as error:
        if cut:  # the server may close a broken connection while it answers
            return []
        raise Failure(f"an answer is cut off: {error}") from None
    except ValueError as error:
        raise Failure(f"no HTTP: {error}") from None


HEADS = Fuzzer("heads", make, opened)

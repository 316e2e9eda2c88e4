"""Sends hostile frames to a worker: random bytes, and a frontend's messages that are cut, changed or extreme.

After each input, the worker must still give an honest client the same bytes.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass

import httpx
import msgspec
import zmq

from shared import messages as m
from shared.wire import decode_event, encode, pack_u32
from tests.fuzz.fuzzer import HANG_S, Attempt, Failure, Fuzzer, Input
from tests.fuzz.watch import Watch, run_dir

ME = b"mallory!"
WITNESS = {"model": "m", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
EXTREMES = (0, 1, -1, 127, 128, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -1.0, 1e308,
            float("nan"), float("inf"),
            "", "\0", "é" * 3000, b"", b"\xff" * 7, b"\0" * 4000, None, True, [], [[]], [1, 2], {"a": 1})  # fmt: skip
SAMPLINGS = (
    m.Sampling(2), m.Sampling(2, temperature=0.0, logprobs=3, prompt_logprobs=True),
    m.Sampling(3, grammar="start: /a*/"),
    m.Sampling(2, stop_token_ids=(1, 2), logit_bias=((1, 2.0),), seed=1, bad_words=((1, 2),),
               allowed_token_ids=(1, 2, 3)),
    m.Sampling(2, thinking=m.ThinkingBudget(1, (1,), 2, (2, 3))),
)  # fmt: skip
PROMPT = pack_u32([5, 6, 7])
REQUESTS = (
    *[m.Submit(1, PROMPT, sampling) for sampling in SAMPLINGS],
    m.Submit(2, PROMPT, m.Sampling(0), pooling=m.Pooling(m.PoolingKind.LAST)),
    m.Submit(3, PROMPT, m.Sampling(2), answer=pack_u32([1, 2])),
    m.Submit(4, PROMPT, m.Sampling(4), generated=pack_u32([8])),
    m.Abort((1, 2)), m.Resync(1, 0), m.Lease(1, 1, pack_u32([1])), m.Hello(1, 1), m.ResetPrefixCache(1),
)  # fmt: skip


def make(rng: random.Random) -> Input:
    return {
        "frames": [changed(rng, encode(rng.choice(REQUESTS))).decode("latin-1") for _ in range(rng.choice([1, 2, 10]))]
    }


def changed(rng: random.Random, frame: bytes) -> bytes:
    """Returns the frame with a value replaced at any depth, with changed bytes, cut, or empty."""
    match rng.randrange(8):
        case 0:
            return frame[: rng.randrange(len(frame))]
        case 1:
            return rng.randbytes(rng.choice([0, 1, 30, 2000]))
        case 2:
            out = bytearray(frame)
            for _ in range(rng.randint(1, 4)):
                out[rng.randrange(len(out))] = rng.randrange(256)
            return bytes(out)
        case 3:
            return frame + rng.choice([b"\xc0", b"\x91" * 100_000, frame])
        case 4:
            return frame
        case _:
            value = msgspec.msgpack.decode(frame)
            for _ in range(rng.randint(1, 3)):
                _replace(rng, value)
            return msgspec.msgpack.encode(value)


def _replace(rng: random.Random, value: list[object]) -> None:
    """Replaces one value in a message, adds one or takes one away."""
    at = rng.randrange(len(value)) if value else 0
    inner = value[at] if value else None
    match rng.randrange(6):
        case 0 if value:
            del value[at]
        case 1:
            value.insert(at, deepcopy(rng.choice(EXTREMES)))
        case _ if isinstance(inner, list) and inner and rng.random() < 0.8:
            _replace(rng, inner)
        case _ if value:
            # a copy, because the next change would otherwise change EXTREMES
            value[at] = deepcopy(rng.choice(EXTREMES))


@dataclass
class Witness:
    """An honest client, whose answer must stay the same."""

    url: str

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S + 1)
        self.expected = self.answer()

    def answer(self) -> str:
        try:
            response = self.client.post("/v1/completions", json=WITNESS)
        except httpx.TimeoutException:
            raise TimeoutError("an honest client waits") from None
        except httpx.TransportError as error:
            raise Failure(f"no HTTP answer to an honest client: {error!r}") from None
        if response.status_code != 200:
            raise Failure(f"an honest client got {response.status_code}: {response.text[:300]}")
        return str(response.json()["choices"][0]["text"])

    def close(self) -> None:
        self.client.close()

    def check(self) -> None:
        if (answer := self.answer()) != self.expected:
            raise Failure(f"an honest client got {answer!r} instead of {self.expected!r}")


@contextmanager
def speaking(watch: Watch) -> Iterator[tuple["zmq.Socket[bytes]", m.Welcome]]:
    """Opens a socket to the server's worker. Yields the socket after the handshake, and the worker's Welcome."""
    folder = run_dir(watch.server.stats())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard, said = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        heard.setsockopt(zmq.SUBSCRIBE, ME)
        heard.connect(f"ipc://{folder}/events.sock")
        said.setsockopt(zmq.IDENTITY, ME)
        said.connect(f"ipc://{folder}/requests.sock")
        while True:
            said.send(encode(m.Hello(1, os.getpid())))
            if heard.poll(500):
                event = decode_event(heard.recv_multipart()[1])
                if isinstance(event, m.Welcome):
                    break
        heard.close(linger=0)
        yield said, event
    finally:
        said.close(linger=0)
        heard.close(linger=0)
        context.term()


@contextmanager
def opened(watch: Watch) -> Iterator[Attempt]:
    with closing(Witness(watch.url)) as witness, speaking(watch) as (said, _):

        def attempt(input: Input) -> None:
            said.send(encode(m.Hello(1, os.getpid())))
            for frame in input["frames"]:
                said.send(frame.encode("latin-1"))
            said.send(encode(m.Abort((0, 1, 2, 3, 4, 127, 128, 2**31, 2**32 - 1))))
            time.sleep(0.002)
            witness.check()

        yield attempt


FRAMES = Fuzzer("frames", make, opened)

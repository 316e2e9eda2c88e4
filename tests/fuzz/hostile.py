"""A hostile worker sends a frontend random bytes, and Welcome, Step and Status messages that it cut or changed.

The frontend is a separate process, which is also connected to the honest worker of the server.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import zmq

from shared import messages as m
from shared.wire import decode_request, encode, pack_f32, pack_u32
from tests.e2e.server import ROOT, free_port
from tests.fuzz.frames import Witness, changed, speaking
from tests.fuzz.fuzzer import Attempt, Failure, Fuzzer, Input
from tests.fuzz.watch import Watch, run_dir
from tests.patience import PATIENCE_S

EPOCH = 7
READY = m.Status(EPOCH, 1, "m", "cpu", "bfloat16", m.WorkerState.READY)
AWAY = m.Status(EPOCH, 1, "m", "cpu", "bfloat16", m.WorkerState.DRAINING)


def _step(seq: int, id: int) -> m.Step:
    return m.Step(
        EPOCH, seq, pack_u32([id]), pack_u32([0]), pack_u32([2]), pack_u32([5, 6]), (m.Admitted(id, 1),), (),
        (m.End(id, m.Outcome.LENGTH, 2),), 
        (m.Logprobs(id, 0, pack_f32([-1, -1]), 1, pack_u32([1, 2]), pack_f32([-1, -1])),),
        (m.Started(id, m.Timings()),), (id,), (m.Pooled(id, pack_f32([1.0])),),
    )  # fmt: skip


def make(rng: random.Random) -> Input:
    frames = []
    for _ in range(rng.choice([1, 3, 10])):
        event = rng.choice([
            lambda: _step(rng.choice([0, 1, 2, 2**40]), rng.choice([1, 2, 3])),
            lambda: READY,
            lambda: m.Welcome(rng.randrange(9), EPOCH, 1, "m", "hash", m.Limits(2048, 1000, (0,))),
        ])()  # fmt: skip
        frames.append({
            "topic": rng.choice(["own", "own", "all", "odd"]),
            "body": changed(rng, encode(event)).decode("latin-1"),
            "parts": rng.choice([2, 2, 2, 2, 1, 3]),
            "socket": rng.choice(["events", "events", "events", "requests"]),
        })  # fmt: skip
    return {"frames": frames}


@dataclass
class Mallory:
    """The hostile worker's sockets. `greet` does the handshake, so that the frontend accepts it as a worker."""

    events: "zmq.Socket[bytes]"
    requests: "zmq.Socket[bytes]"
    model: m.Welcome
    sender: bytes = b""

    def hear(self) -> None:
        """Answers each Hello with a Welcome like the honest worker's."""
        while self.requests.poll(0):
            self.sender, body, *_ = self.requests.recv_multipart()
            try:
                request = decode_request(body)
            except msgspec.DecodeError:
                continue
            if isinstance(request, m.Hello):
                welcome = msgspec.structs.replace(self.model, nonce=request.nonce, epoch=EPOCH, seq=0)
                self.events.send_multipart([self.sender, encode(welcome)])

    def say(self, frame: dict[str, str | int]) -> None:
        topics = {"own": self.sender, "all": m.BROADCAST, "odd": b"\xff\0"}
        body = str(frame["body"]).encode("latin-1")
        parts = [topics[str(frame["topic"])], body, b"more"][: int(frame["parts"])]
        if frame["socket"] == "requests":
            self.requests.send_multipart([self.sender, *parts])
        else:
            self.events.send_multipart(parts)


@contextmanager
def _frontend(watch: Watch, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    addresses = f"ipc://{run_dir(watch.server.stats())} ipc://{folder}"
    served = list(map(str, watch.server.process.args))  # type: ignore[arg-type]
    model = served[served.index("--model") + 1]
    command = [sys.executable, "-m", "deploy.cli.main", "frontend", "--model", model, "--served-model-name", "m"]
    command += ["--worker-addresses", addresses, "--port", str(port), "--drain-timeout", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield process, url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


@contextmanager
def opened(watch: Watch) -> Iterator[Attempt]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events, requests = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    with (
        speaking(watch) as (_, welcome),
        tempfile.TemporaryDirectory() as name,
        _frontend(watch, Path(name)) as (process, url),
    ):
        events.bind(f"ipc://{name}/events.sock")
        requests.bind(f"ipc://{name}/requests.sock")
        mallory, witness = Mallory(events, requests, welcome), Witness(url)

        def attempt(input: Input) -> None:
            mallory.events.send_multipart([m.BROADCAST, encode(AWAY)])
            mallory.hear()
            for frame in input["frames"]:
                if mallory.sender:
                    mallory.say(frame)
            mallory.events.send_multipart([m.BROADCAST, encode(AWAY)])
            time.sleep(0.002)
            if process.poll() is not None:
                raise Failure("the frontend died: " + Path(name, "log").read_text()[-2000:])
            witness.check()

        try:
            until = time.monotonic() + PATIENCE_S
            while not mallory.sender and time.monotonic() < until:
                events.send_multipart([m.BROADCAST, encode(AWAY)])
                mallory.hear()
                time.sleep(0.01)
            yield attempt
        finally:
            witness.close()
            events.close(linger=0)
            requests.close(linger=0)
    context.term()


HOSTILE = Fuzzer("hostile worker", make, opened)

"""Kills a worker while several clients ask for vectors, and compares every vector with those of an undisturbed run.

Requests have from one text to more than a window of prompts (frontend/generation/service.py). Every text is different,
and none is asked for twice, so a vector that is lost, doubled or given to another text is seen.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from tests.encoders import WORDS
from tests.faults.server import ServerPlan, ServerUnderTest, running
from tests.patience import PATIENCE_S

SIZES = (1, 1, 2, 5, 16, 1, 64, 300)  # texts of a request
PAUSE_S, MOST_REFUSALS = 0.2, 10_000
FINISHED = "sluice_request_success_total"


@dataclass
class VectorsRow:
    """What the clients received."""

    texts: int = 0
    requests: int = 0
    kills: int = 0
    refused: int = 0  # answers 503 while no worker is ready, after which a client asks again
    identical: int = 0
    wrong: int = 0  # vectors with other bits than undisturbed
    lost: int = 0  # texts without a vector
    doubled: int = 0  # texts with more than one vector, in an answer or by the server's own count
    longest_s: float = 0.0  # the longest request
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.wrong or self.lost or self.doubled or self.notes) and self.identical == self.texts


def table(row: VectorsRow) -> str:
    """Returns the row as a Markdown table."""
    names = ("texts", "requests", "kills", "refused", "identical", "wrong", "lost", "doubled")
    values = (f"{getattr(row, name):,}" for name in names)
    return (
        f"| {' | '.join(names)} | longest request s |\n|{'--:|' * (len(names) + 1)}\n"
        f"| {' | '.join(values)} | {row.longest_s:.1f} |"
    )


def plan(model: str) -> ServerPlan:
    """A server of one worker and two frontends."""
    return ServerPlan(("--chat-template", "", "--dtype", "float32"), model=model)


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Returns different texts of one to some thirty words."""
    rng = random.Random(seed)
    return [f"{_letters(at)} {' '.join(rng.choices(WORDS, k=rng.choice((1, 4, 8, 30))))}" for at in range(count)]


def _letters(number: int) -> str:
    """Returns a number of base 26, because tiny vocabularies have no digits."""
    return (_letters(number // 26) if number > 25 else "") + chr(ord("a") + number % 26)


def requests_of(texts: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields the place of each request's first text, and its texts."""
    at = turn = 0
    while at < len(texts):
        part = texts[at : at + SIZES[turn % len(SIZES)]]
        yield at, part
        at, turn = at + len(part), turn + 1


def drive(model: str, count: int, *, kills: int, clients: int) -> VectorsRow:
    """Computes the texts once undisturbed, and again while the worker is killed `kills` times."""
    with running(plan(model)) as server:
        return asyncio.run(disturbed(server, texts_of(count), kills=kills, clients=clients))


async def disturbed(server: ServerUnderTest, texts: Sequence[str], *, kills: int, clients: int) -> VectorsRow:
    row, expected, found = VectorsRow(texts=len(texts)), dict[int, str](), dict[int, str]()
    await _asked(server, texts, clients, expected, VectorsRow())
    assert len(expected) == len(texts), "the undisturbed run is not whole"
    before, pids = await _finished(server), set[int]()
    asking = asyncio.create_task(_asked(server, texts, clients, found, row))
    for turn in range(kills):
        due = (turn + 1) * len(texts) // (kills + 2)
        await _until(lambda due=due: len(found) >= due or asking.done())  # type: ignore[misc]
        await server.until(lambda stats: stats["worker"]["state"] == "ready" and stats["worker"]["pid"] not in pids)
        pid = await server.worker()
        if asking.done():
            row.notes.append("the texts were computed before the worker was killed")
            break
        os.kill(pid, signal.SIGKILL)
        pids.add(pid)
        row.kills += 1
    await asking
    row.doubled += max(0, await _finished(server) - before - len(texts))
    row.lost = len(texts) - len(found)
    row.identical = sum(found[at] == expected[at] for at in found)
    row.wrong = len(found) - row.identical
    return row


async def _asked(
    server: ServerUnderTest, texts: Sequence[str], clients: int, found: dict[int, str], row: VectorsRow
) -> None:
    """Has `clients` clients send all requests, each when its last one was answered, and enters vectors in `found`."""
    waiting = requests_of(texts)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            for first, part in waiting:
                begun = time.monotonic()
                body = {"model": "m", "input": [*part], "encoding_format": "base64"}
                answer = await http.post("/v1/embeddings", json=body)
                while answer.status_code == 503 and row.refused < MOST_REFUSALS:  # SDKs ask again, too
                    row.refused += 1
                    await asyncio.sleep(PAUSE_S)
                    answer = await http.post("/v1/embeddings", json=body)
                row.requests += 1
                row.longest_s = max(row.longest_s, time.monotonic() - begun)
                if answer.status_code != 200:
                    row.notes.append(f"a request of {len(part)} texts: {answer.status_code} {answer.text:.300}")
                    continue
                data = answer.json()["data"]
                row.doubled += sum(times - 1 for times in Counter(one["index"] for one in data).values())
                found.update({first + one["index"]: one["embedding"] for one in data})

    await asyncio.gather(*(client() for _ in range(clients)))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def _finished(server: ServerUnderTest) -> int:
    """Returns how many texts the frontends together say that they have answered."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(FINISHED)))

"""Measures what a store costs a frontend: CPU time a token and time to the first token, off and on, in pairs.

`python -m bench.micro.kept --streams 256 --rounds 5` starts a frontend for each kind in each round: without a store,
with one and requests that keep nothing, and with one and streams that all have an id. The order turns with each round.
CPU time has all threads of the frontend, that of the store included. `--store postgresql://…` takes that database in
place of a file of SQLite.

`--beside` measures streams that are not kept and streams that are in one frontend, in turns of `--steps` steps. Their
ratio changes little on a busy machine.
"""

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.micro.frontend import DONE, REQUESTS, frontends
from bench.micro.scripted_worker import Group, ScriptedWorker, StreamReaders, admit, connected_streams, request

KINDS = ("no store", "store, nothing kept", "store, all streams kept")
WARM = 3  # steps before those that are measured


@dataclass(frozen=True, slots=True)
class Sample:
    """token_us, loop_us: CPU time of all threads, and of the event loop's thread alone
    first_ms, last_ms: median and last first token of streams that all come at once
    """

    token_us: float
    loop_us: float
    first_ms: float
    last_ms: float


def measure(kind: str, streams: int, steps: int, store: str) -> Sample:
    flags = () if kind == KINDS[0] else ("--store", store)
    with frontends(1, *flags) as (worker, (server,)), connected_streams([server.port], streams) as clients:
        clients.send_each(partial(_request, named=kind == KINDS[2]))
        first = clients.read(1, meanwhile=lambda: worker.receive(0.0, first=True))
        for _ in range(WARM):
            worker.step()
            clients.read(1)
        before, loop_before = server.cpu(), server.loop_cpu()
        for _ in range(steps):
            worker.step()
            clients.read(1)
        spent, loop_spent = server.cpu() - before, server.loop_cpu() - loop_before
        worker.step(last=True)
        clients.read(1, DONE)
    tokens = steps * streams
    return Sample(1e6 * spent / tokens, 1e6 * loop_spent / tokens, 1e3 * first[streams // 2], 1e3 * first[-1])


def beside(streams: int, turns: int, steps: int, store: str) -> str:
    """Returns what plain and kept streams of one frontend cost, and the median of the ratios of two turns."""
    with (
        frontends(1, "--store", store) as (worker, (server,)),
        connected_streams([server.port], streams) as plain,
        connected_streams([server.port], streams) as kept,
    ):
        groups = list[tuple[StreamReaders, Group]]()
        for clients, named in ((plain, False), (kept, True)):
            worker.group = Group()
            clients.send_each(partial(_request, named=named))
            admit(worker, streams)
            groups.append((clients, worker.group))
            _step(worker, *groups[-1], WARM)
        spent: list[list[tuple[float, float]]] = [[], []]
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                before, loop_before = server.cpu(), server.loop_cpu()
                _step(worker, *groups[which], steps)
                spent[which].append((server.cpu() - before, server.loop_cpu() - loop_before))
        for clients, group in groups:
            worker.group = group
            worker.step(last=True)
            clients.read(1, DONE)
    ratios = [one[0] / base[0] for base, one in zip(*spent, strict=True)]
    scale = 1e6 / steps / streams
    shown = [
        f"{scale * median(all for all, _ in found):.1f} ({scale * median(loop for _, loop in found):.1f} in the loop)"
        for found in spent
    ]
    return f"{streams} streams: {shown[0]} µs a token, kept {shown[1]}; median of the ratios {median(ratios):.3f}"


def _request(number: int, *, named: bool) -> bytes:
    return request(*REQUESTS["completions"], f"x-conversation-id: {number}\r\n" if named else "")


def _step(worker: ScriptedWorker, clients: StreamReaders, group: Group, steps: int) -> None:
    worker.group = group
    for _ in range(steps):
        worker.step()
        clients.read(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", default="", help="URL of a Postgres")
    parser.add_argument("--beside", action="store_true", help="measure both kinds of streams in one frontend")
    args = parser.parse_args()
    if args.beside:
        with tempfile.TemporaryDirectory() as folder:
            print(beside(args.streams, args.rounds, args.steps, args.store or str(Path(folder) / "kept.db")))
        return
    samples: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
                store = args.store or str(Path(folder) / f"{turn}-{KINDS.index(kind)}.db")
                samples[kind].append(measure(kind, args.streams, args.steps, store))
    print(
        "| | CPU µs a token | of it the loop's thread | to no store, median of pairs | first token p50, ms | last, ms |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for kind, found in samples.items():
        ratios = [one.token_us / base.token_us for one, base in zip(found, samples[KINDS[0]], strict=True)]
        each = [median(getattr(one, name) for one in found) for name in ("token_us", "loop_us", "first_ms", "last_ms")]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {kind} | {each[0]:.1f} | {each[1]:.1f} | {spread} | {each[2]:.0f} | {each[3]:.0f} |")


if __name__ == "__main__":
    main()

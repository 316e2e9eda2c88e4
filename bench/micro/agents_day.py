"""Counts the prompt tokens that a day of agents computes, with and without a K/V store, on an engine without HTTP.

    python -m bench.micro.agents_day [--agents 10] [--turns 30] [--restarts 3] [--kv-cache-gb GB ...]

Every agent sends its whole conversation again at each turn, as agents do: a beginning that all of them share (the
system prompt and the tools), its own task, and for each turn the answer of the model and the result of a tool. All
agents send their turns at once; the next turn begins when all are answered and the store has written what it was given.
The server restarts between turns, at equal distances: its memory is lost, and the folder of the store stays.

Lengths and tokens are drawn from a seed, answers are greedy, and the store always fetches (`--kv-store-fetch always`),
so that counts do not depend on how fast the machine is, as long as the disk answers. Each row of the table is a size of
the K/V pool. A token counts whenever a step computes it: one that is computed again after a preemption counts twice.
"""

import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.checkpoints import checkpoint
from shared.config.flags import Parser
from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

from shared.config.settings import ModelConfig  # noqa: E402
from shared.config.worker import WorkerConfig  # noqa: E402
from shared.messages import Sampling  # noqa: E402
from worker.engine.build import load_engine  # noqa: E402
from worker.engine.kv_store import open_store  # noqa: E402
from worker.scheduler.sequence import Plan, Sequence  # noqa: E402

STORE_GB = 4.0  # more than a day writes, so that nothing is evicted from the store
FIRST_ID = 16  # ids below may be special tokens
SHORTEST = 0.5  # the shortest task or result, as a share of the average; the longest is as much longer
HEADINGS = (
    "pool, tokens", "prompt tokens", "computed without a store", "with", "ratio", "found in the store", "its MB",
)  # fmt: skip


@dataclass(slots=True)
class Day:
    """What the agents of a day sent and got.

    sent: tokens of all prompts; computed: those of them that steps computed; fetched: those that came from the store
    stored: bytes of the store's files in the end; pool: tokens for which the K/V pool has room
    """

    sent: int = 0
    computed: int = 0
    fetched: int = 0
    stored: int = 0
    pool: int = 0
    answers: list[list[int]] = field(default_factory=list)


class Server:
    """An engine that is stepped by hand. folder: of the K/V store; None: without a store"""

    def __init__(self, args: Namespace, gb: float, folder: Path | None) -> None:
        worker = WorkerConfig(
            device="cpu", kv_cache_gb=gb, speculation="off", kv_store=str(folder or ""), kv_store_gb=str(STORE_GB),
            kv_store_fetch="always",
        )  # fmt: skip
        self._engine = load_engine(ModelConfig(model=str(args.model)), worker)
        self._store = open_store(worker, self._engine, lambda: None) if folder else None
        self.pool = (self._engine.size.pages[0] - 1) * worker.page_size  # without the scratch page
        self.vocabulary = self._engine.spec.vocab_size

    def answer(self, prompts: list[list[int]], new: int, day: Day) -> list[list[int]]:
        """Returns the answers of `new` tokens, and adds to the day what they cost."""
        sampling = Sampling(new, temperature=0.0, ignore_eos=True)
        sequences = [Sequence((b"", at), list(one), len(one), sampling, 0) for at, one in enumerate(prompts)]
        scheduler, fetching = self._engine.scheduler, self._engine.scheduler.state.paging.fetching
        before = fetching.hits if fetching else 0
        for sequence in sequences:
            scheduler.submit(sequence, time.monotonic())
        while scheduler.has_work:
            now = time.monotonic()
            if plan := scheduler.plan(now):
                day.computed += _prompt_tokens(plan)
                scheduler.launched(plan)
                scheduler.update(plan, self._engine.runner.step(plan).ids, now)
            else:
                time.sleep(0.001)  # all sequences wait for the store
        while self._store and not self._store.is_settled:
            time.sleep(0.001)
        day.fetched += fetching.hits - before if fetching else 0
        return [sequence.tokens[sequence.prompt_len :] for sequence in sequences]

    def close(self) -> int:
        """Ends the server. Returns the bytes of its store."""
        if self._store is None:
            return 0
        self._store.close()
        return self._store.tiers[0].counts.nbytes


def _prompt_tokens(plan: Plan) -> int:
    """The number of tokens of prompts that a step computes."""
    ends = [min(chunk.start + chunk.length, chunk.sequence.prompt_len) for chunk in plan.chunks]
    return sum(max(0, end - chunk.start) for chunk, end in zip(plan.chunks, ends, strict=True))


def measured(args: Namespace, gb: float, folder: Path | None) -> Day:
    """Runs a day. folder: of the K/V store, which must be empty; None: without a store"""
    draw, day, server = random.Random(args.seed), Day(), Server(args, gb, folder)
    day.pool = server.pool
    ends = {args.turns * at // (args.restarts + 1) for at in range(1, args.restarts + 1)}

    def text(average: int) -> list[int]:
        length = draw.randint(round(average * SHORTEST), round(average * (2 - SHORTEST)))
        return [draw.randrange(FIRST_ID, server.vocabulary) for _ in range(length)]

    shared = text(args.shared)
    prompts = [shared + text(args.result) for _ in range(args.agents)]
    for turn in range(args.turns):
        if turn in ends:
            server.close()
            server = Server(args, gb, folder)
        day.sent += sum(map(len, prompts))
        answers = server.answer(prompts, args.answer, day)
        day.answers += answers
        prompts = [prompt + answer + text(args.result) for prompt, answer in zip(prompts, answers, strict=True)]
    day.stored = server.close()
    return day


def table(args: Namespace) -> Iterator[str]:
    """Yields the lines of the table. Raises ValueError if the store changed an answer."""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + "--:|" * len(HEADINGS)
    for gb in args.kv_cache_gb:
        without = measured(args, gb, None)
        with TemporaryDirectory(prefix="sluice-agents-") as folder:
            stored = measured(args, gb, Path(folder) / "kv")
        if stored.answers != without.answers:
            raise ValueError("the store changed an answer")
        yield (
            f"| {without.pool:,} | {without.sent:,} | {without.computed:,} | {stored.computed:,} "
            f"| {without.computed / stored.computed:.2f} | {stored.fetched:,} | {stored.stored / 1e6:.0f} |"
        )


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.micro.agents_day", description="Counts the prompt tokens of a day of agents.")
    add = parser.add_argument
    add("--model", type=Path, help="a GGUF file or the folder of a checkpoint; default: a tiny one with random weights")
    add("--agents", type=int, default=10)
    add("--turns", type=int, default=30, help="of each agent")
    add("--restarts", type=int, default=3, help="of the server, at equal distances")
    add("--shared", type=int, default=2000, help="tokens of the beginning that all agents share, on average")
    add("--result", type=int, default=100, help="tokens of a task or of a tool's result, on average")
    add("--answer", type=int, default=20, help="tokens of an answer")
    add("--kv-cache-gb", type=float, nargs="+", default=[0.05, 0.005], help="sizes of the K/V pool, one a row")
    add("--seed", type=int, default=0)
    args = parser.read(words)
    args.model = args.model or checkpoint("tiny")
    for line in table(args):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

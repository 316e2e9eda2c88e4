"""Measures what a K/V store that writes costs steps: windows of equal work with and without it, in turns, in one run.

    python -m bench.micro.kv_store [--model qwen3-0.6b] [--sequences 8] [--pairs 16] [--prompts 4] [--folder DIR]

In each window that writes, one file's tokens become complete: its pages are copied at the beginning, and the store's
thread writes them while the window computes. Windows of decoding are as many steps as that takes `--sequences`
sequences, which are staggered; those of a prompt are one chunk of as many tokens as a file has. The order within pairs
turns, so that longer contexts and a machine that becomes slower cost both sides the same. A ratio is the median of all
pairs, with the quartiles: of the time, of the CPU time of the thread that steps, and of the CPU time of the process,
which includes the store's threads. A late window ended before its file was written.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from bench.checkpoints import SHAPES, checkpoint
from shared.config.flags import Parser, positive_int
from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402

from shared.config.settings import ModelConfig  # noqa: E402
from shared.config.worker import WorkerConfig  # noqa: E402
from shared.messages import Sampling  # noqa: E402
from worker.device import threads_of  # noqa: E402
from worker.engine.build import Engine, load_engine  # noqa: E402
from worker.engine.kv_store import open_store  # noqa: E402
from worker.kv_cache.store import KvStore  # noqa: E402
from worker.scheduler.sequence import Plan, Sequence  # noqa: E402

CLOCKS = {"time": time.perf_counter, "the thread's CPU time": time.thread_time, "all CPU time": time.process_time}
WARM = 2  # pairs before those that are measured: the first copies need new memory
FIRST_ID = 16  # ids below may be special tokens
HEADINGS = ("", "pairs", "a step without, ms", *CLOCKS, "files", "MB", "late")


@dataclass(slots=True)
class Windows:
    """spent: of each window, what each of CLOCKS counted, in seconds; late: windows that ended before their file was
    written"""

    writing: list[tuple[float, ...]] = field(default_factory=list)
    idle: list[tuple[float, ...]] = field(default_factory=list)
    late: int = 0


class Bench:
    """An engine whose store can be taken away and given back between steps."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self.engine, self.store, self.scheduler = engine, store, engine.scheduler
        self.tokens = store.pages.block * store.pages.page_size  # of a file
        self._computed: tuple[Plan, object] | None = None  # a step whose results are not applied yet
        paging = self.scheduler.state.paging
        assert paging.fetching is not None and store.is_settled
        self._calls: list[tuple[list, object]] = [(paging.journals, paging.fetching)]  # type: ignore[type-arg]
        if (states := self.scheduler._states) is not None:
            self._calls.append((states.on_publish, paging.fetching.published_state))

    def write(self, on: bool) -> None:
        """Has the store told of pages from now on, or not."""
        for told, who in self._calls:
            if who in told:
                told.remove(who)
            if on:
                told.append(who)

    def begin(self, lengths: list[int], new: int) -> list[Sequence]:
        """Submits prompts of random tokens, and computes their first chunks."""
        sampling = Sampling(new, temperature=0.0, ignore_eos=True)
        draw = [torch.randint(FIRST_ID, self.engine.spec.vocab_size, (length,)).tolist() for length in lengths]
        sequences = [Sequence((b"", at), prompt, len(prompt), sampling, 0) for at, prompt in enumerate(draw)]
        for sequence in sequences:
            self.scheduler.submit(sequence, time.monotonic())
        self.write(False)
        self.compute()
        return sequences

    def compute(self) -> None:
        """Computes a step, and does not apply its results yet."""
        while not (plan := self.scheduler.plan(time.monotonic())):
            time.sleep(0.001)  # the store looks for the prompt
        self.scheduler.launched(plan)
        self._computed = plan, self.engine.runner.step(plan).ids

    def apply(self) -> None:
        assert self._computed is not None
        plan, ids = self._computed
        self._computed = None
        self.scheduler.update(plan, ids, time.monotonic())  # type: ignore[arg-type]

    def window(self, steps: int, found: Windows, *, writes: bool) -> None:
        self.write(writes)
        before = [clock() for clock in CLOCKS.values()]
        for _ in range(steps):
            self.apply()
            self.compute()
        spent = tuple(clock() - began for clock, began in zip(CLOCKS.values(), before, strict=True))
        (found.writing if writes else found.idle).append(spent)
        found.late += not self.store.is_settled
        self.settle()

    def settle(self) -> None:
        while not self.store.is_settled:
            time.sleep(0.001)

    def end(self, sequences: list[Sequence]) -> None:
        self.write(False)
        self.apply()
        for sequence in sequences:
            self.scheduler.abort(sequence.key)


def decoded(bench: Bench, count: int, pairs: int) -> tuple[Windows, int]:
    """Returns the windows of decoding, and how many steps each has."""
    steps, found = bench.tokens // count, Windows()
    lengths = [bench.tokens - at * steps for at in range(count)]  # one of them completes a file in each window
    sequences = bench.begin(lengths, (2 * pairs + 1) * steps + 2)
    for at in range(pairs):
        for writes in (at % 2 == 0, at % 2 == 1):
            bench.window(steps, found, writes=writes)
    bench.end(sequences)
    return found, steps


def prefilled(bench: Bench, prompts: int, pairs: int) -> tuple[Windows, int]:
    found = Windows()
    for number in range(prompts):
        sequences = bench.begin([(2 * pairs + 2) * bench.tokens], 2)
        for at in range(pairs):
            for writes in ((at + number) % 2 == 0, (at + number) % 2 == 1):
                bench.window(1, found, writes=writes)
        bench.end(sequences)
    return found, 1


def row(name: str, found: Windows, steps: int, warm: int, files: int, nbytes: int) -> str:
    pairs = list(zip(found.writing, found.idle, strict=True))[warm:]
    cells = [name, str(len(pairs)), f"{1e3 * median([idle[0] for _, idle in pairs]) / steps:.2f}"]
    for clock in range(len(CLOCKS)):
        ratios = [writing[clock] / idle[clock] for writing, idle in pairs]
        low, middle, high = quantiles(ratios, n=4)
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return "| " + " | ".join([*cells, str(files), f"{nbytes / 1e6:.0f}", str(found.late)]) + " |"


def table(args: Namespace, folder: Path) -> Iterator[str]:
    worker = WorkerConfig(
        device="cpu", kv_cache_gb=args.kv_cache_gb, speculation="off", kv_store=str(folder), kv_store_gb="20",
        prefill_chunk_size=256, max_step_tokens=256 * args.sequences, max_batch_size=args.sequences,
        threads=args.threads,
    )  # fmt: skip
    torch.set_num_threads(threads_of(worker))
    engine = load_engine(ModelConfig(model=str(args.model)), worker)
    store = open_store(worker, engine, lambda: None)
    if store is None:
        raise SystemExit("this model keeps no K/V")
    while not store.is_settled:
        time.sleep(0.001)
    bench, counts = Bench(engine, store), store.tiers[0].counts
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|---|" + "--:|" * (len(HEADINGS) - 1)
    for name in ("decode", "prompt"):
        files, nbytes = counts.written, counts.written_bytes
        if name == "decode":
            found, steps = decoded(bench, args.sequences, WARM + args.pairs)
        else:
            found, steps = prefilled(bench, args.prompts, args.pairs // 2)
        warm = WARM if name == "decode" else 0
        yield row(name, found, steps, warm, counts.written - files, counts.written_bytes - nbytes)
    store.close()


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.micro.kv_store", description="Measures what a store that writes costs steps.")
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, a GGUF file or the folder of a checkpoint")
    add("--sequences", type=positive_int, default=8, help="that decode together; a power of two up to 256")
    add("--pairs", type=positive_int, default=16, help="of windows of decoding; at least four")
    add("--prompts", type=positive_int, default=4, help="each with half as many pairs of windows")
    add("--folder", type=Path, help="where the store's folder is made for this run; default: the system's for such")
    add("--kv-cache-gb", type=float, default=2.0)
    add("--threads", type=int, default=0)
    args = parser.read(words)
    args.pairs = max(args.pairs, 4)  # quartiles of a prompt need two
    args.model = checkpoint(args.model) if args.model in SHAPES else Path(args.model)
    with TemporaryDirectory(prefix="sluice-kv-store-", dir=args.folder) as folder:
        for line in table(args, Path(folder) / "kv"):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

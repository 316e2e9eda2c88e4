"""Runs every workload in every mode: starts the servers, sends the same requests to each, collects all records."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.client.load_client import Call, Record, Target, run
from bench.client.server import BenchError, longest, running, served
from bench.client.summary import Summary, reasons, summarize
from bench.client.workloads import Scale, Workload

# mode → the flags of `sluice serve` that select it. Plan.flags adds further flags.
MODES: dict[str, tuple[str, ...]] = {
    "static": ("--batching-mode", "static"),
    "continuous": ("--batching-mode", "continuous"),
    "chunked": ("--use-chunked-prefill",),
    "unchunked": ("--no-use-chunked-prefill",),
    "paged": ("--kv-cache-backend", "paged"),
    "contiguous": ("--kv-cache-backend", "contiguous"),
    "prefix": ("--prefix-cache",),
    "noprefix": ("--no-prefix-cache",),
    "invariant": ("--batch-invariant",),
    "noninvariant": ("--no-batch-invariant",),
}

Say = Callable[[str], None]
Report = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Result:
    """The records of one workload in one mode."""

    workload: str
    mode: str
    records: list[Record] = field(repr=False)
    summary: Summary


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: a running server at `url` with `model` (empty: its first model), or the model `serve`, which is
    started with `flags`."""

    workloads: Sequence[Workload]
    scale: Scale
    vocab: int
    url: str = ""
    model: str = ""
    serve: str = ""
    flags: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()


def measure(plan: Plan) -> list[Result]:
    """Returns all results, mode by mode. Raises BenchError if a server is unreachable, dies or answers no request."""
    if plan.url:
        return list(_workloads(plan, running(plan.url, plan.model), "as it runs"))
    results: list[Result] = []
    for mode in plan.modes or ("",):
        _say(f"starting {plan.serve}{f', {mode}' if mode else ''}")
        with served(plan.serve, (*plan.flags, *(MODES[mode] if mode else ()))) as target:
            results += _workloads(plan, target, mode or "as served")
    return results


def _workloads(plan: Plan, target: Target, mode: str) -> Iterator[Result]:
    for workload in plan.workloads:
        calls = workload.make(plan.vocab, plan.scale)
        _check_fits(workload, calls, target)
        records = _run(workload, calls, target, mode)
        _check_alive(workload, records, target)
        yield Result(workload.name, mode, records, summarize(records))


def _run(workload: Workload, calls: list[Call], target: Target, mode: str) -> list[Record]:
    warm = asyncio.run(run(target, workload.warm_up(calls), sequential=True))
    if all(record.error for record in warm):
        raise BenchError(f"{workload.name}: {_why(warm)} (while warming up)")
    with progress(f"{workload.name}, {mode}", len(calls)) as report:
        return asyncio.run(run(target, calls, report, sequential=workload.sequential))


def _check_fits(workload: Workload, calls: list[Call], target: Target) -> None:
    need, room = max(len(call.prompt) + call.max_tokens for call in calls), longest(target)
    if 0 < room < need:
        share = int(100 * room / need) / 100
        raise BenchError(
            f"{workload.name} has sequences of {need} tokens and the server accepts {room}: use --length-scale, "
            f"{share:g} times what it was"
        )


def _check_alive(workload: Workload, records: list[Record], target: Target) -> None:
    failed = sum(bool(record.error) for record in records)
    if failed == len(records):
        raise BenchError(f"{workload.name}: every request failed: {_why(records)}")
    if failed:
        try:
            longest(target)
        except BenchError as error:
            raise BenchError(f"{workload.name}: the server died; {failed} requests failed: {_why(records)}") from error


def _why(records: Sequence[Record]) -> str:
    return reasons(records)[0][0]


@contextmanager
def progress(what: str, total: int) -> Iterator[Report]:
    """Shows progress: a bar on a terminal, else a line at every quarter."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # type: ignore[import-untyped]

        with tqdm(total=total, desc=what, unit="request", file=sys.stderr) as bar:
            yield lambda record: _none(bar.update())
        return
    yield _Lines(what, total, _say).report


class _Lines:
    def __init__(self, what: str, total: int, say: Say) -> None:
        self._what, self._total, self._say = what, total, say
        self._ends: Counter[bool] = Counter()
        self._steps = {-(-total * quarter // 4) for quarter in range(1, 5)}

    def report(self, record: Record) -> None:
        self._ends[bool(record.error)] += 1
        ended = self._ends.total()
        if ended in self._steps:
            failed = f", {self._ends[True]} failed" if self._ends[True] else ""
            self._say(f"{self._what}: {ended} of {self._total}{failed}")


def _none(value: object) -> None:
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

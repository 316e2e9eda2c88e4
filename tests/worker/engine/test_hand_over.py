"""Prompts that are computed for another worker: each request ends once, when the K/V store has its pages."""

from collections.abc import Callable
from typing import Any

import pytest

from shared import messages as m
from shared.wire import pack_u32
from tests.worker.engine.harness import Bench, submit
from worker.engine import kv_store
from worker.engine.kv_store import HandOver
from worker.engine.transport import FrontendGone
from worker.engine.validation import check_submit
from worker.kv_cache.pages import PagePool

PROMPT = [token % 9 for token in range(40)]
ONLY = m.Prefill.ONLY


class SlowStore:
    """A store that has written what it was given when a test says so."""

    def __init__(self) -> None:
        self.written, self.asked = False, 0

    def flush(self) -> Callable[[], bool]:
        self.asked += 1
        return lambda: self.written


def bench_with(store: Any) -> Bench:
    bench = Bench(pools=[PagePool(129, 16)])
    bench.request_table.hand_over = HandOver(store)
    return bench


def ends(bench: Bench) -> dict[int, m.Outcome]:
    outputs, found = bench.received()
    assert not any(outputs.values())
    return {id: end.outcome for id, end in found.items()}


def test_request_ends_when_its_pages_are_written() -> None:
    store = SlowStore()
    bench = bench_with(store)
    bench.send(submit(1, PROMPT, prefill=ONLY))
    bench.iterate(4)
    assert not ends(bench) and store.asked == 1 and not bench.scheduler.has_work
    assert bench.scheduler.status.prefill_tokens == len(PROMPT) and not bench.scheduler.status.generation_tokens
    store.written = True
    bench.iterate()
    assert ends(bench) == {1: m.Outcome.PREFILLED}
    bench.iterate(3)
    assert ends(bench) == {1: m.Outcome.PREFILLED}, "once"


def test_disk_that_hangs_is_not_waited_for_long() -> None:
    bench = bench_with(SlowStore())
    bench.send(submit(1, PROMPT, prefill=ONLY))
    bench.iterate(int(kv_store.MOST_S) - 1)
    assert not ends(bench)
    bench.iterate(4)
    assert ends(bench) == {1: m.Outcome.PREFILLED}


def test_worker_without_a_store_ends_the_request_at_once() -> None:
    bench = Bench()
    bench.send(submit(1, PROMPT, prefill=ONLY), submit(2, PROMPT, 3))
    bench.iterate(5)
    outputs, found = bench.received()
    assert found[1].outcome is m.Outcome.PREFILLED and found[1].tokens == 0 and 1 not in outputs
    assert len(outputs[2]) == 3


@pytest.mark.parametrize("how", ["abort", "lease", "gone"])
def test_client_that_leaves_while_pages_are_written_ends_the_request(how: str) -> None:
    store = SlowStore()
    bench = bench_with(store)
    bench.send(submit(1, PROMPT, prefill=ONLY))
    bench.iterate(3)
    match how:
        case "abort":
            bench.send(m.Abort((1,)))
        case "lease":
            bench.send(m.Lease(0, 1, b""))
        case "gone":
            bench.send(FrontendGone())
    bench.iterate()
    store.written = True
    bench.iterate(3)
    assert ends(bench) == ({} if how == "gone" else {1: m.Outcome.ABORTED})


def test_worker_that_stops_hands_over_what_it_has() -> None:
    bench = bench_with(SlowStore())
    bench.send(submit(1, PROMPT, prefill=ONLY))
    bench.iterate(3)
    bench.send(submit(2, PROMPT * 9, prefill=ONLY))
    bench.request_table.receive(bench.server.inbox, bench.now)
    bench.request_table.end_all(m.Outcome.SHUTDOWN, bench.now, "stopped")
    bench.request_table.publish(bench.server, bench.now)  # type: ignore[arg-type]
    assert ends(bench) == {1: m.Outcome.PREFILLED, 2: m.Outcome.SHUTDOWN}


def test_request_that_is_asked_about_again_is_answered_again() -> None:
    store = SlowStore()
    bench = bench_with(store)
    again = submit(1, PROMPT, prefill=ONLY)
    bench.send(again)
    bench.iterate(3)
    bench.send(again)
    bench.iterate(2)
    assert not ends(bench) and store.asked == 1
    store.written = True
    bench.iterate(2)
    assert ends(bench) == {1: m.Outcome.PREFILLED}


def test_earlier_output_is_computed_with_the_prompt() -> None:
    bench = Bench()
    bench.send(submit(1, PROMPT, 30, generated=pack_u32([7] * 20), prefill=ONLY))
    bench.iterate(4)
    assert bench.scheduler.status.prefill_tokens == len(PROMPT) + 20 and ends(bench) == {1: m.Outcome.PREFILLED}


def test_request_that_was_handed_over_has_been_admitted_before() -> None:
    bench = Bench()
    bench.send(*(submit(id, [id], 40) for id in range(1, 30)))
    bench.send(submit(100, PROMPT, 2), submit(101, PROMPT, 2, prefill=m.Prefill.DONE))
    bench.iterate()
    rejected = {one.id for _, step in bench.server.sent for one in step.rejected}
    admitted = {one.id for _, step in bench.server.sent for one in step.admitted}
    assert 100 in rejected and 101 in admitted


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": m.Pooling(m.PoolingKind.LAST)}, {"answer": pack_u32([1])},
        {"sampling": m.Sampling(1, prompt_logprobs=True)},
    ],
)  # fmt: skip
def test_prompt_whose_rows_are_the_result_is_refused(options: dict[str, Any]) -> None:
    one = m.Submit(1, pack_u32(PROMPT), **{"sampling": m.Sampling(0), **options, "prefill": ONLY})
    assert "another worker" in check_submit(one, 1000)

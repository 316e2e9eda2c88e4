"""Measures the cost per page of reporting cached pages to routers: in the compute loop, and in the sending thread.

    python -m bench.micro.kv_events [--page-size 16] [--prompt 2048] [--prompts 200]

The scheduler gives pages to prompts of random ids, publishes them as if they were computed, and frees them; the pool
is small, so that each page is evicted again. There are three runs: without a journal; with the reports to frontends
that every worker makes; and with a journal whose events a publisher encodes and sends. There is no model, so the first
run shows what the prefix cache costs by itself.
"""

import argparse
import random
import time
from collections.abc import Callable

from bench.client.summary import aligned
from shared.config.flags import positive_int
from shared.messages import Sampling
from worker.engine.kv_events import KvEventPublisher, PageJournal
from worker.engine.prefix_report import PrefixReport
from worker.kv_cache.pages import PagePool
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import RequestStats, SchedulingParams, Sequence

BATCH = 4  # prompts between two batches of events
ENDPOINT = "tcp://127.0.0.1:9"  # no process listens on this port


def paging_of(page_size: int, prompt: int) -> Paging:
    pages = 3 * prompt // page_size
    return Paging([PagePool(pages, page_size)], prefix_cache=True, watermark=0.0, chunk=prompt)


def sequences(prompt: int, prompts: int) -> list[Sequence]:
    draw = random.Random(0)
    return [
        Sequence(
            (b"bench", number),
            [draw.randrange(100_000) for _ in range(prompt)],
            prompt,
            Sampling(1),
            0,
            turn=SchedulingParams(),
            history=RequestStats(0.0),
        )
        for number in range(prompts)
    ]


def _nothing() -> None: ...


def seconds(paging: Paging, each: list[Sequence], publish: Callable[[], object]) -> tuple[float, float]:
    """Runs all prompts. Returns the seconds spent in the scheduler, and the seconds spent in `publish`."""
    scheduling = publishing = 0.0
    for number, sequence in enumerate(each, 1):
        begun = time.perf_counter()
        if not paging.claim(sequence, alone=True):
            raise RuntimeError("the pool is too small")
        paging.publish(sequence, 0, len(sequence.tokens))
        paging.free(sequence)
        done = time.perf_counter()
        scheduling += done - begun
        if number % BATCH == 0:
            publish()
            publishing += time.perf_counter() - done
    return scheduling, publishing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=positive_int, default=16)
    parser.add_argument("--prompt", type=positive_int, default=2048, help="tokens")
    parser.add_argument("--prompts", type=positive_int, default=200)
    args = parser.parse_args()
    pages = args.prompts * (args.prompt // args.page_size)
    publish: Callable[[], object]
    rows = [["", "compute loop, µs a page", "thread, µs a page"]]
    for name in ("without", "with reports to frontends", "with --kv-events-endpoint"):
        paging, publish = paging_of(args.page_size, args.prompt), _nothing
        if name == "with reports to frontends":
            publish = PrefixReport.of(paging, {}).take
        if name == "with --kv-events-endpoint":
            publisher = KvEventPublisher.open(PageJournal.of(paging), "kv@bench@m", ENDPOINT, "")
            publish = publisher.publish
        spent = seconds(paging, sequences(args.prompt, args.prompts), publish)
        rows.append([name, *(f"{each / pages * 1e6:.2f}" for each in spent)])
        if name == "with --kv-events-endpoint":
            publisher.close()
    print(aligned(rows))


if __name__ == "__main__":
    main()

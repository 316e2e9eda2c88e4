"""Simulates a fleet: many workers with real schedulers, many frontends with real routers, and delayed statuses.

    python -m bench.simulate.fleet [--workers 1 10 100 1000] [--workload NAME] [--seconds 12] [--prefill-share 0.5]

It is a discrete-event simulation: the events are arrivals, ends of steps, deaths and restarts. A request arrives at a
random frontend. The frontend chooses a worker from its own streams and from each worker's last status; workers send
their status every 0.2 s. The worker's scheduler plans steps over its own pages, and a cost model gives their times.
Messages take no time.

A worker that dies restarts after 2 s with an empty cache; its streams resume on other workers after their last token.
When a frontend dies, its answers break and their clients ask another frontend; it restarts after 2 s and knows nothing
of earlier requests. The table has, for each number of workers:

    prefill          how many of the workers compute long prompts for the others, with --prefill-share
    µs a request     a frontend's CPU time on this machine to choose a worker
    µs a status      a frontend's CPU time to process a worker's decoded status
    status kB/s      the statuses of all workers together; every frontend decodes all of them
    cached           the share of prompt tokens that came from prefix caches
    p50, p99 TTFT    the time from a client's first attempt to the first token (simulated)
    p99 gap          the time between two tokens of a stream (simulated), without pauses
    remote           prompts that prefill workers have computed
    resumed          streams that resumed on another worker; p99 pause: time from the death to the next token
    broken           answers that a frontend's death broke, so that clients asked again
    lost             requests that got neither a whole answer nor a refusal
"""

import argparse
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from bench.client.summary import aligned
from bench.simulate.cost import CostModel, load
from bench.simulate.fleet_picture import Line, drawn
from bench.simulate.fleet_run import STATUS_S, Fleet, Result
from bench.simulate.fleet_workloads import WORKLOADS, Workload
from shared.config.flags import positive_float, positive_int

ROUTING = ("learnt", "homes", "reports", "picker")
FRONTENDS_FOR = 20  # workers per frontend
HEAD = [
    "workers", "prefill", "frontends", "routing", "requests", "refused", "µs a request", "µs a status", "status kB/s",
    "cached", "p50 TTFT", "p99 TTFT", "p99 gap", "remote", "resumed", "p99 pause", "broken", "lost",
]  # fmt: skip
CHARTS: dict[str, Callable[[Result], float]] = {
    "time to the first token, 99 of 100, in seconds": lambda result: result.quantile(result.ttft, 0.99),
    "share of prompt tokens from caches": lambda result: result.hits / max(1, result.queries),
    "µs of a frontend for a request": lambda result: result.choices / max(1, result.requests) * 1e6,
    "statuses that a frontend reads, MB/s": lambda result: result.status_bytes / max(1, result.rounds) / STATUS_S / 1e6,
}


def simulate(
    workers: int, workload: Workload, seconds: float, cost: CostModel, routing: str = "reports",
    prefill: int = 0, transfer_s: float = 0.0,
) -> Fleet:  # fmt: skip
    """Runs one fleet until every request has ended. The same arguments give the same simulation.

    prefill, transfer_s: see Fleet
    """
    frontends = min(50, max(1, workers // FRONTENDS_FOR))
    fleet = Fleet(workers, frontends, cost, routing=routing, prefill=prefill, transfer_s=transfer_s)
    deaths = workload.deaths(workers, frontends, seconds, random.Random(workers + 1))
    fleet.run(workload.arrivals(workers, seconds, random.Random(workers)), deaths)
    return fleet


def row(fleet: Fleet, routing: str) -> list[str]:
    result = fleet.result
    return [
        str(len(fleet.workers)), str(len(fleet.prefill)), str(len(fleet.routers)), routing,
        str(result.requests), str(result.refused),
        f"{result.choices / max(1, result.requests) * 1e6:.0f}",
        f"{result.learning / max(1, result.statuses * len(fleet.routers)) * 1e6:.1f}",
        f"{result.status_bytes / max(1, result.rounds) / STATUS_S / 1e3:.0f}",
        f"{result.hits / max(1, result.queries):.2f}",
        f"{result.quantile(result.ttft, 0.5):.2f}", f"{result.quantile(result.ttft, 0.99):.2f}",
        f"{result.quantile(result.gaps, 0.99):.3f}", str(result.remote),
        str(result.resumed), f"{result.quantile(result.pauses, 0.99):.2f}", str(result.broken), str(result.lost),
    ]  # fmt: skip


def main(argv: list[str] | None = None, show: Callable[[Any], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--workload", choices=WORKLOADS, default="agents")
    parser.add_argument("--seconds", type=positive_float, default=12.0, help="of arrivals")
    parser.add_argument("--cost", default="cpu-qwen3-0.6b", help="see sluice simulate")
    parser.add_argument(
        "--routing", choices=ROUTING, nargs="+", default=["reports"],
        help="learnt: each frontend learns prefixes alone; homes: frontends agree on the workers of a prefix (by "
        "rendezvous hashing); reports: and workers report which prefixes they have; picker: one picker for all "
        "requests follows the K/V events of all workers",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-share",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="X",
        help="this share of the workers computes long prompts, and nothing else; not with the picker",
    )
    parser.add_argument(
        "--transfer-us",
        type=positive_float,
        default=10.0,
        metavar="X",
        help="microseconds until the K/V of a token of such a prompt is where it is generated from (100 KB at 10 GB/s)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the table as charts into this SVG file")
    args = parser.parse_args(argv)
    if not all(0 <= share < 1 for share in args.prefill_share):
        parser.error("--prefill-share must be at least 0 and less than 1")
    if any(args.prefill_share) and "picker" in args.routing:
        parser.error("--prefill-share does not go with the picker, which chooses for all requests")
    rows, lines = [HEAD], dict[str, list[Line]]()
    for routing, share in product(args.routing, args.prefill_share):
        fleets = [
            simulate(
                count, WORKLOADS[args.workload], args.seconds, load(args.cost), routing,
                round(share * count), 1e-6 * args.transfer_us,
            )
            for count in args.workers
        ]  # fmt: skip
        rows += [row(fleet, routing) for fleet in fleets]
        name = f"{routing}, {share:.0%} prefill" if share else routing
        for title, value in CHARTS.items():
            lines.setdefault(title, []).append(Line(name, [value(fleet.result) for fleet in fleets]))
    show(aligned(rows))
    if args.picture:
        args.picture.write_text(drawn(f"{args.workload}: fleets of different sizes", args.workers, lines))


if __name__ == "__main__":
    main()

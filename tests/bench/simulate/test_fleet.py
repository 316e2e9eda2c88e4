"""The simulation of a fleet: every request ends, the same seed gives the same, and prefixes find their pages."""

import random

from bench.simulate.cost import CostModel
from bench.simulate.fleet import WORKLOADS, Fleet, Workload, main, quantile

COST = CostModel(overhead=0.01, token=1e-4, kv_token=0.0)
SHARED = Workload(groups=0.5, prefix=600, tail=(5, 20), output=4, rate=2.0)


def run(workload: Workload, workers: int, frontends: int) -> Fleet:
    fleet = Fleet(workers, frontends, COST)
    fleet.run(workload.arrivals(workers, 5.0, random.Random(1)))
    return fleet


def test_every_request_is_answered_once_and_nothing_is_left() -> None:
    fleet = run(SHARED, 6, 3)
    result = fleet.result
    assert result.requests > 30 and len(result.ttft) + result.refused == result.requests
    assert not any(worker.streams or worker.scheduler.has_work for worker in fleet.workers)
    assert not any(len(router._placement) for router in fleet.routers)
    assert min(result.ttft) > 0


def test_the_same_traffic_gives_the_same_times() -> None:
    assert run(SHARED, 4, 2).result.ttft == run(SHARED, 4, 2).result.ttft


def test_frontends_that_know_nothing_of_each_other_find_the_pages_of_a_shared_prefix() -> None:
    result = run(SHARED, 8, 8).result
    shared = result.hits / result.queries
    alone = run(Workload(groups=1000, prefix=600, tail=(5, 20), output=4, rate=2.0), 8, 8).result
    assert shared > 0.6 > 0.05 > alone.hits / alone.queries


def test_table_has_a_row_for_each_number_of_workers() -> None:
    shown: list[str] = []
    main(["--workers", "1", "2", "--seconds", "1", "--workload", "bursts"], shown.append)
    assert len(shown[0].splitlines()) == 4 and set(WORKLOADS) == {"agents", "chat", "bursts"}


def test_quantile() -> None:
    assert (quantile([], 0.5), quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)) == (0.0, 2.0, 2.0)

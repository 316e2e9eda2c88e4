"""The simulation of a fleet: every request ends, equal seeds give equal results, cached prefixes are found, and no
request is lost when workers die."""

import random
import xml.etree.ElementTree as ET
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulate.cost import CostModel
from bench.simulate.fleet import main
from bench.simulate.fleet_picker import PageIndex
from bench.simulate.fleet_picture import Line, drawn
from bench.simulate.fleet_run import RESTART_S, Fleet, Result
from bench.simulate.fleet_workloads import WORKLOADS, Deaths, Workload
from worker.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, block_hash

COST = CostModel(overhead=0.01, token=1e-4, kv_token=0.0)
SHARED = Workload(groups=0.5, prefix=600, tail=(5, 20), output=4, rate=2.0)
DOCUMENTS = Workload(groups=1000, prefix=8, tail=(200, 2500), output=30, rate=1.5)
LONG = replace(SHARED, output=60, rate=6.0, worker_deaths=0.2, frontend_deaths=0.2)


def run(workload: Workload, workers: int, frontends: int, routing: str = "homes", prefill: int = 0) -> Fleet:
    fleet = Fleet(workers, frontends, COST, routing=routing, prefill=prefill, transfer_s=1e-5)
    deaths = workload.deaths(workers, frontends, 5.0, random.Random(2))
    fleet.run(workload.arrivals(workers, 5.0, random.Random(1)), deaths)
    return fleet


def check_nothing_is_left(fleet: Fleet) -> None:
    assert fleet.result.lost == 0
    assert not any(worker.streams or worker.scheduler.has_work for worker in fleet.workers)
    assert not any(len(router) for router in (*fleet.routers, *fleet.helpers))


def test_every_request_is_answered_once_and_nothing_is_left() -> None:
    fleet = run(SHARED, 6, 3)
    result = fleet.result
    assert result.requests > 30 and len(result.ttft) + result.refused == result.requests
    assert min(result.ttft) > 0 and not result.pauses and not result.resumed and not result.broken
    check_nothing_is_left(fleet)


@pytest.mark.parametrize("workers, frontends", [(6, 3), (4, 2)])
def test_deaths_of_workers_and_frontends_lose_no_request(workers: int, frontends: int) -> None:
    fleet = run(replace(LONG, worker_deaths=0.4, frontend_deaths=0.4), workers, frontends)
    result = fleet.result
    assert result.resumed and result.broken and result.answered > 5
    check_nothing_is_left(fleet)


def test_prefill_workers_compute_the_long_prompts_and_the_others_find_them() -> None:
    plain, apart = run(DOCUMENTS, 6, 2), run(DOCUMENTS, 6, 2, prefill=3)
    long = sum(len(prompt) >= 1024 for _, prompt, _ in DOCUMENTS.arrivals(6, 5.0, random.Random(1)))
    assert 5 < apart.result.remote == long < apart.result.requests and not plain.result.remote
    for fleet in (plain, apart):
        assert fleet.result.answered == fleet.result.requests
        check_nothing_is_left(fleet)
    assert plain.result.hits == 0 and apart.result.hits > 0.9 * 1024 * long, (
        "pages of prompts are found where they moved"
    )
    assert not any(worker.scheduler.status.generation_tokens > long for worker in apart.workers[3:])


def test_deaths_beside_prefill_workers_lose_no_request() -> None:
    dying = replace(DOCUMENTS, rate=6.0, output=90, worker_deaths=0.3, frontend_deaths=0.8)
    for prefill in (1, 3):
        fleet = run(dying, 4, 2, prefill=prefill)
        assert fleet.result.resumed and fleet.result.broken and fleet.result.remote
        check_nothing_is_left(fleet)


def test_a_picker_that_follows_events_finds_the_pages_of_all_workers() -> None:
    fleet = run(LONG, 6, 3, "picker")
    assert fleet.result.resumed and fleet.result.broken
    check_nothing_is_left(fleet)
    for worker in fleet.workers:
        assert worker.journal is not None
        known = fleet.routers[0].index._keys[worker.index]  # type: ignore[attr-defined]
        assert known.keys() == {block_hash(digest) for digest in worker.journal.found}
    assert any(worker.journal.found for worker in fleet.workers if worker.journal)
    picked, learnt = run(SHARED, 8, 8, "picker").result, run(SHARED, 8, 8, "learnt").result
    assert picked.hits / picked.queries > learnt.hits / learnt.queries + 0.05


def test_index_of_pages_knows_the_longest_prefix_of_each_worker() -> None:
    index, prompt = PageIndex(), array("I", range(12))
    stored = BlockStored([7, 8], None, [*range(8)], 4, None, None, None)
    index.take(0, [stored, BlockStored([9], 8, [*range(8, 12)], 4, None, None, None)])
    index.take(1, [stored, BlockStored([9], 1234, [*range(8, 12)], 4, None, None, None)])
    assert index.saved(prompt, 4) == {0: 12, 1: 8}, "a page after an unknown one is not found"
    assert index.saved(prompt[:6], 4) == {0: 4, 1: 4} and index.saved(prompt[1:], 4) == {}
    index.take(0, [BlockRemoved([8], None)])
    assert index.saved(prompt, 4) == {0: 4, 1: 8}
    index.take(1, [AllBlocksCleared()])
    assert index.saved(prompt, 4) == {0: 4}


def test_a_stream_goes_on_at_another_worker_with_the_output_it_has() -> None:
    fleet = Fleet(2, 1, COST)
    result = fleet.run(iter([(0.0, list(range(300, 400)), 50)]), Deaths([(0.3, 0), (0.3001, 1)], []))
    assert result.answered == 1 and result.lost == 0
    assert len(result.ttft) == 1 and result.ttft[0] < 0.1, "the first token is not computed again"
    [pause] = result.pauses
    assert RESTART_S <= pause < RESTART_S + 0.5, "no worker was left, so it waits for the first one that is back"


def test_clients_of_a_frontend_that_dies_ask_again() -> None:
    fleet = Fleet(1, 1, COST)
    result = fleet.run(iter([(0.0, list(range(300, 400)), 50)]), Deaths([], [(0.3, 0)]))
    assert (result.broken, result.answered, result.lost, result.resumed) == (1, 1, 0, 0)
    assert len(result.ttft) == 2 and result.ttft[1] > RESTART_S


def test_the_same_traffic_gives_the_same_times() -> None:
    assert run(LONG, 4, 2).result.ttft == run(LONG, 4, 2).result.ttft


def test_frontends_that_know_nothing_of_each_other_find_the_pages_of_a_shared_prefix() -> None:
    shared, learnt = run(SHARED, 8, 8).result, run(SHARED, 8, 8, routing="learnt").result
    apart = run(replace(SHARED, groups=1000), 8, 8).result
    assert shared.hits / shared.queries > 0.6 > 0.05 > apart.hits / apart.queries
    assert shared.hits / shared.queries > learnt.hits / learnt.queries + 0.1


def test_table_has_a_row_and_the_picture_a_point_for_each_number_of_workers(tmp_path: Path) -> None:
    shown, picture = list[str](), tmp_path / "fleet.svg"
    words = ["--workers", "1", "2", "--seconds", "1", "--workload", "bursts", "--routing", "learnt", "homes"]
    main([*words, "--picture", str(picture)], shown.append)
    assert len(shown[0].splitlines()) == 6 and WORKLOADS.keys() == {"agents", "chat", "bursts", "documents", "failures"}
    tags = [element.tag.rpartition("}")[2] for element in ET.fromstring(picture.read_text()).iter()]
    assert tags.count("circle") == 4 * 2 * 2 and tags.count("polyline") == 4 * 2


def test_table_has_a_row_for_each_share_of_prefill_workers() -> None:
    shown = list[str]()
    main(["--workers", "4", "--seconds", "1", "--prefill-share", "0", "0.5"], shown.append)
    assert [line.split("|")[2].strip() for line in shown[0].splitlines()[2:]] == ["0", "2"]
    for words in (["--prefill-share", "1"], ["--prefill-share", "0.5", "--routing", "picker"]):
        with pytest.raises(SystemExit):
            main(words)


def test_picture_puts_the_largest_value_on_top() -> None:
    root = ET.fromstring(drawn("a & b", [1, 10, 100], {"x": [Line("one", [0.0, 5.0, 10.0])]}))
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter() if c.tag.endswith("circle")]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert x2 - x1 == pytest.approx(x3 - x2) and y1 - y2 == pytest.approx(y2 - y3) and y1 > y3


def test_quantile() -> None:
    quantile = Result.quantile
    assert (quantile([], 0.5), quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)) == (0.0, 2.0, 2.0)

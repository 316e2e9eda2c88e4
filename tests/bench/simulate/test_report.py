"""The report of a simulation on a terminal, in a file and as a picture."""

import json
from pathlib import Path

from bench.simulate.report import ROWS, numbers, outcome, peaks, plot, timeline
from tests.bench.simulate.harness import simulated, traffic


def test_peaks_are_those_of_each_slice_of_time() -> None:
    # steps begin at 0, 1, 2 and 3 s, then no step before 7 s, then a step
    result = simulated(traffic((0, 4, 4), (1.5, 4, 2), (7, 4, 1)))
    assert result.end == 8
    assert peaks(result, ROWS["batch"], 8)[4:6] == [0, 0]
    assert peaks(result, ROWS["batch"], 2) == [2, 1]
    assert peaks(result, ROWS["pages free"], 1) == [64]


def test_timeline_has_a_row_for_each_quantity_and_its_maximum() -> None:
    result = simulated(traffic(*[(0.0, 4, 8)] * 10), max_batch_size=4)
    lines = timeline(result, 40).splitlines()
    assert len({len(line.rpartition("|")[0]) for line in lines}) == 1, "the rows are not aligned"
    assert [line.split("|")[0].strip() for line in lines] == [*ROWS, ""]
    assert lines[0].endswith("| 6") and lines[1].endswith("| 4")
    assert lines[0].split("|")[1].startswith("@") and lines[0].split("|")[1].endswith(" ")
    assert lines[1].split("|")[1].startswith("@" * 20)
    assert lines[-1].split("|")[1].strip().endswith("24 s")
    assert timeline(result, 40).isascii()


def test_timeline_of_an_empty_replay_is_drawn() -> None:
    assert timeline(simulated(traffic()), 20).count("\n") == len(ROWS)


def test_outcome_distinguishes_refusals() -> None:
    flags = {"max_batch_size": 1, "max_waiting_requests": 1}
    result = simulated(traffic((0, 4, 4), (0.5, 4, 1), (0.6, 4, 1), (0.7, 4, 5000)), **flags)
    assert outcome(result) == "2 finished, 1 refused with 503, 1 impossible, 0 preemptions, 5 steps in 5.0 s"


def test_numbers_are_complete_and_fit_json() -> None:
    content = json.loads(json.dumps(numbers(simulated(traffic((0, 4, 3), (4, 4, 1))))))
    assert (content["end"], content["steps"], content["preemptions"], content["refused"]) == (5, 4, 0, 0)
    assert [request["stamps"] for request in content["requests"]] == [[1, 2, 3], [5]]
    assert content["timeline"]["at"] == [0, 1, 2, 3, 4]
    assert {len(column) for column in content["timeline"].values()} == {5}


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    plot({"first": simulated(traffic((0, 4, 3))), "second": simulated(traffic((0, 4, 5000)))}, path)
    assert "first" in path.read_text() or path.stat().st_size > 10_000

from bench.client.load_client import Record
from bench.workloads.measure import MODES
from bench.workloads.plots import bins, png
from tests.bench.results import picture_size, records, result


def test_png_grows_with_workloads_and_accepts_empty_results() -> None:
    groups = {"a": [result("a", "one", records(3))], "b": [result("b", "one", [Record(error="x"), *records(1)[:0]])]}
    one, two = picture_size(png({"a": groups["a"]})), picture_size(png(groups))
    assert one[0] == two[0] and two[1] == 2 * one[1]


def test_png_draws_all_modes_together() -> None:
    assert picture_size(png({"a": [result("a", mode, records(2)) for mode in MODES]}))


def test_bins_keep_their_gaps() -> None:
    assert bins([(0.1, 1.0), (0.4, 2.0), (2.9, 3.0)], 1.0) == {0.5: [1.0, 2.0], 1.5: [], 2.5: [3.0]}
    assert bins([], 1.0) == {}

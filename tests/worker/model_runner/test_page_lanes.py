"""Rows of page tables on the device: each sequence keeps its row, and only new pages are sent to the device."""

from array import array

import pytest
import torch

from shared.messages import Sampling
from worker.model_runner import cuda_graph_inputs
from worker.model_runner.cuda_graph_inputs import DevicePageTables
from worker.scheduler.sequence import Chunk, Sequence

CPU = torch.device("cpu")


def chunk(first_page: int, length: int) -> Chunk:
    pages = [array("i", range(first_page, first_page + 4))]
    sequence = Sequence((b"f", first_page), [0] * length, 1, Sampling(9), 0, pages=pages)
    return Chunk(sequence, length - 1, 1, True)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records the indexes of the page-table cells that each transfer changes."""
    cells: list[list[int]] = []
    to_device = cuda_graph_inputs.to_device

    def counting(values, device):  # type: ignore[no-untyped-def]
        cells.append(values[0].tolist())
        return to_device(values, device)

    monkeypatch.setattr(cuda_graph_inputs, "to_device", counting)
    return cells


def test_sequence_that_stays_sends_no_page_when_others_come_and_go(sent: list[list[int]]) -> None:
    table_rows, (a, b, c) = DevicePageTables(2, 4, 1, CPU), (chunk(first, 20) for first in (10, 20, 30))
    assert table_rows.rows_of([a, b], 16) == [0, 1] and len(sent[0]) == 4
    assert table_rows.rows_of([b], 16) == [1]
    assert table_rows.rows_of([c, b], 16) == [0, 1] and sent[1:] == [[0, 1]], "the table_row of a is given to c"
    assert table_rows.tables[0].tolist() == [[30, 31, 0, 0], [20, 21, 0, 0], [0] * 4]


def test_growing_sequence_sends_its_new_page_only(sent: list[list[int]]) -> None:
    table_rows, one = DevicePageTables(2, 4, 1, CPU), chunk(10, 32)
    table_rows.rows_of([one], 16)
    grown = Chunk(one.sequence, 32, 1, True)
    assert table_rows.rows_of([grown], 16) == table_rows.rows_of([grown], 16) == [0]
    assert sent == [[0, 1], [2]] and table_rows.tables[0][0].tolist() == [10, 11, 12, 0]


def test_preempted_sequence_gets_its_new_pages(sent: list[list[int]]) -> None:
    table_rows, one = DevicePageTables(1, 4, 1, CPU), chunk(10, 20)
    table_rows.rows_of([one], 16)
    one.sequence.pages = [array("i", range(50, 54))]
    (table_row,) = table_rows.rows_of([one], 16)
    assert table_rows.tables[0][table_row][:2].tolist() == [50, 51]

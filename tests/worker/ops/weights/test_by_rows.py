"""Work by slices of rows: slices cover every row once, errors reach the caller, and the thread count is restored."""

import pytest
import torch

from worker.ops import quantized_weight as module
from worker.ops.quantized_weight import by_rows


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (100, 7), (101, 64), (3, 100_000)])
def test_every_row_is_converted_once(
    rows: int, columns: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    monkeypatch.setattr(module, "CPU_NUMBERS", 256)
    monkeypatch.setattr(module, "GPU_NUMBERS", 512)
    seen = torch.zeros(rows, columns)
    sizes: list[int] = []

    def convert(part: slice) -> None:
        seen[part] += 1
        sizes.append(len(seen[part]))

    by_rows(rows, columns, convert, on_gpu=on_gpu)
    assert bool((seen == 1).all()) and max(sizes) <= max(1, (512 if on_gpu else 256) // columns)
    assert torch.get_num_threads() == 2


def test_each_slice_has_one_thread_and_its_error_arrives(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(module, "CPU_NUMBERS", 1)
    threads: list[int] = []

    def convert(part: slice) -> None:
        threads.append(torch.get_num_threads())
        if part.start == 5:
            raise ValueError("row 5")

    with pytest.raises(ValueError, match="row 5"):
        by_rows(9, 1, convert, on_gpu=False)
    assert threads and set(threads) == {1} and torch.get_num_threads() == 2


def test_tensors_of_inference_mode_are_converted(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(module, "CPU_NUMBERS", 1)
    with torch.inference_mode():
        seen = torch.zeros(9, 1)
        by_rows(9, 1, lambda part: seen[part].add_(1), on_gpu=False)  # type: ignore[func-returns-value]
        assert bool((seen == 1).all())

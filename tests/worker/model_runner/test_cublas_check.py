import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from worker.model_runner import check_bits
from worker.model_runner.check_bits import compare, row_counts, with_cublas_where_equal
from worker.operations import TORCH
from worker.ops.linear.cublas import Product
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import linear_torch

PACKED = PackedLinear(torch.arange(48.0).view(4, 12) / 7, None, True)


def same(x: Tensor, weight: Tensor, bias: Tensor | None, whole_rows: int = 0, **how: Any) -> Tensor:
    return linear_by_rows(x, PackedLinear(weight, bias, True), **how)


def linear_by_rows(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
    return torch.cat([linear_torch(row[None], packed, **how) for row in x])


def other_bits(x: Tensor, *rest: Any, **how: Any) -> Tensor:
    return same(x, *rest, **how).nextafter(torch.tensor(torch.inf)) if len(x) == 300 else same(x, *rest, **how)


def other_bits_in_float32(x: Tensor, *rest: Any, fp32_out: bool, whole_rows: int) -> Tensor:
    return same(x, *rest) * (1 + 2**-20 if fp32_out else 1)


def broken(x: Tensor, *rest: Any, **how: Any) -> Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")


@pytest.mark.parametrize(
    ("library", "problems"),
    [
        (same, ["", ""]),
        (other_bits, ["", "has other bits"]),
        (other_bits_in_float32, ["has other bits"] * 2),
        (broken, ["fails (RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED)"] * 2),
    ],
)
def test_compare_finds_what_the_library_computes_otherwise(library: Any, problems: list[str]) -> None:
    found = list(compare(PACKED, [256, 300], linear_by_rows, library))
    assert [product for product, _ in found] == [Product(4, 12, 256), Product(4, 12, 300)]
    assert [problem for _, problem in found] == problems


def test_compare_finds_a_row_that_depends_on_the_others() -> None:
    def together(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        return linear_by_rows(x, packed, **how) * (1 if len(x) == 1 else 1 + 2**-20)

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, whole_rows: int, **how: Any) -> Tensor:
        return together(x, PackedLinear(weight, bias, True), **how)

    assert [problem for _, problem in compare(PACKED, [256], together, library)] == [
        "gives a row other bits than alone"
    ]


def test_row_counts_are_powers_of_two_three_times_these_and_the_largest_steps() -> None:
    assert row_counts(2048, 700) == {256, 384, 512, 700, 768, 1024, 1536, 2048}
    assert row_counts(100, 32) == set()


def test_checked_library_computes_what_was_equal_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_bits.os, "environ", {})
    caplog.set_level(logging.INFO, "sluice.load")
    weights = SimpleNamespace(layers=[SimpleNamespace(linears=[PACKED, PACKED])], head=PACKED)
    decoder: Any = SimpleNamespace(weights=weights, operations=TORCH, with_operations=lambda operations: operations)
    worker = WorkerConfig(max_step_tokens=700, prefill_chunk_size=256)
    assert with_cublas_where_equal(decoder, replace(worker, gpu_options="")) is decoder and not caplog.records
    monkeypatch.setattr(check_bits, "compare", partial(compare, ours=linear_by_rows, library=other_bits))
    operations: Any = with_cublas_where_equal(decoder, worker)
    assert operations.linear.args[1] == {Product(4, 12, rows) for rows in (256, 384, 512, 700)}
    monkeypatch.setattr(check_bits, "compare", partial(compare, ours=linear_by_rows, library=broken))
    assert with_cublas_where_equal(decoder, worker) is TORCH  # type: ignore[comparison-overlap]
    found = [record.getMessage() for record in caplog.records]
    assert found == [
        "the library computes 4 products of many rows, with the bits of our kernels",
        "the library computes 0 products of many rows, with the bits of our kernels; not those of weights "
        "4 x 12 fails (RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED)",
    ]
    assert check_bits.os.environ.keys() == {"CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"}

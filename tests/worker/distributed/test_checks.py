"""A flipped bit in a rank is found and the rank is named; correct ranks are not blamed."""

import mmap
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.distributed.test_ranks_part import SMALL_ROUND, part, together
from tests.worker.models.harness import CPU, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.distributed.checks import RankDiffers, check_slices, checksums, checksums_from_checkpoint, differing
from worker.engine.load_model import ModelFiles, find_model
from worker.models.decoder import Weights
from worker.models.load import load
from worker.models.sharding import Share
from worker.ops.exchange import shared_bytes


@pytest.mark.parametrize(
    ("sums", "rank"),
    [([5, 5], None), ([5, 6], 1), ([6, 5, 5], 0), ([5, 5, 6, 5], 2), ([0], None), ([5, 6, 7], 1), ([1, 2, 2, 1], 1)],
)
def test_rank_that_differs_from_most_is_named(sums: list[int], rank: int | None) -> None:
    assert differing(sums) == rank


def flip_bit(tensor: Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flipped_bit_of_the_residual_stream_is_found(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    folder, memory = checkpoints("llama"), mmap.mmap(-1, shared_bytes(SMALL_ROUND))
    parts = [part(folder, dtype, Share(rank, 4), memory) for rank in range(4)]
    (row,) = rows_for(parts[0]._cache, prompts_of([40]), 0)
    inputs = pack([(row, 40)], parts[0]._cache.page_size)

    def run() -> list[Any]:
        with torch.inference_mode():
            return together([partial(one.hidden, inputs, checked=True) for one in parts])

    expected = run()
    assert all(torch.equal(expected[0], one) for one in expected[1:])
    plain = parts[2]._layers.hidden

    def wrong(*given: Any) -> Tensor:
        h = plain(*given)
        flip_bit(h[-1], 13)
        return h

    parts[2]._layers.hidden = wrong  # type: ignore[method-assign, assignment]
    found, *others = run()
    assert isinstance(found, RankDiffers) and found.rank == 2 and "rank 2" in str(found)
    assert not any(isinstance(one, Exception) for one in others)


def files_of(folder: Path, worker: WorkerConfig) -> ModelFiles:
    return find_model(ModelConfig(model=str(folder)), worker, CPU)


def loaded(files: ModelFiles, worker: WorkerConfig, share: Share) -> Weights:
    formats = files.formats
    return load(
        files.folder, files.spec, formats.dtype, CPU, invariant=True, memory=formats.memory, share=share
    )  # fmt: skip


def tensors(weights: Weights) -> Iterator[Tensor]:
    for layer in weights.layers:
        for linear in layer.linears:
            assert linear.cpu is not None
            yield from linear.cpu.pieces if hasattr(linear.cpu, "pieces") else [linear.cpu.parts[0].panels]


@needs_library
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama-biased", {"dtype": "bfloat16"}),
        ("llama-biased", {"quantization": "int4-g32"}),
        ("qwen2-moe", {"dtype": "float32"}),
        ("gpt-oss", {"dtype": "bfloat16"}),
        ("qwen3_5", {"dtype": "bfloat16"}),
    ],
)
def test_flipped_bit_of_a_slice_is_found(checkpoints: Checkpoints, kind: str, settings: dict[str, Any]) -> None:
    worker, count = WorkerConfig(device="cpu", tensor_parallel_size=2, **settings), 2
    files = files_of(checkpoints(kind), worker)
    shares = [Share(rank, count) for rank in range(count)]
    weights = [loaded(files, worker, share) for share in shares]
    read = [checksums_from_checkpoint(files.stored(worker), share, lambda: None) for share in shares]
    assert len(read[0]) > 10 * len(files.spec.layers) / 2
    check_slices([checksums(one) for one in weights], read)
    for rank, one in enumerate(weights):
        for tensor in list(tensors(one))[:: 3 + rank]:
            flip_bit(tensor, 5)
            with pytest.raises(RankDiffers, match=re.escape(f"rank {rank} has other weights in layers.")) as found:
                check_slices([checksums(each) for each in weights], read)
            assert found.value.rank == rank
            flip_bit(tensor, 5)
    check_slices([checksums(one) for one in weights], read)


@needs_library
@pytest.mark.parametrize("count", [2, 4])
def test_rank_that_reads_another_checkpoint_is_named(checkpoints: Checkpoints, tmp_path: Path, count: int) -> None:
    """The rank also reports the next rank, because it compares the next rank with its own, different checkpoint."""
    worker = WorkerConfig(device="cpu", dtype="float32")
    good = files_of(checkpoints("llama"), worker)
    folder = Path(shutil.copytree(good.folder, tmp_path / "m"))
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.unlink()  # the file may be a link to the original, which must not change
    file.write_bytes(data)
    bad = replace(good, folder=folder)
    used = [bad if rank == 1 else good for rank in range(count)]
    shares = [Share(rank, count) for rank in range(count)]
    own = [checksums(loaded(files, worker, share)) for files, share in zip(used, shares, strict=True)]
    read = [
        checksums_from_checkpoint(used[rank - 1].stored(worker), shares[rank], lambda: None) for rank in range(count)
    ]
    with pytest.raises(RankDiffers) as found:
        check_slices(own, read)
    assert found.value.rank == 1

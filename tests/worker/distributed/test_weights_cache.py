"""Each rank keeps its packed weights in a file of its own, and reads the same bits from there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.distributed.staged import parts_for, spec_of
from tests.worker.models.harness import CPU
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.engine.load_model import through_cache
from worker.engine.numerics import choose_formats
from worker.models.decoder import Weights
from worker.models.load import load
from worker.models.sharding import Part
from worker.models.weights_cache import _taken_apart

pytestmark = needs_library


class Reader:
    """Loads the weights of parts through a cache, and counts how often they are packed."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.spec, self.packed = folder, spec_of(folder), 0
        self.worker = WorkerConfig(device="cpu", dtype="bfloat16", weights_cache=str(cache))
        self.formats = choose_formats(self.spec, self.worker, CPU)

    def weights(self, part: Part | None, *, keep: bool = True) -> Weights:
        def read() -> Weights:
            self.packed += 1
            given = {} if part is None else {"share": part.share, "stage": part.stage}
            return load(
                self.folder, self.spec, torch.bfloat16, CPU, invariant=True, memory=self.formats.memory, **given
            )

        weights, write = through_cache(read, self.worker, self.folder, self.formats, part)
        if keep:
            write()
        return weights


def tensors(weights: Weights) -> dict[str, Tensor]:
    return _taken_apart(weights)[0]


@pytest.mark.parametrize(
    ("kind", "stages", "tp_size"),
    [("llama-biased", 1, 2), ("qwen2-moe", 2, 2), ("qwen3_5", 2, 1), ("gemma4-inputs", 3, 1)],
)
def test_every_rank_reads_what_it_has_written(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, stages: int, tp_size: int
) -> None:
    reader = Reader(checkpoints(kind), tmp_path)
    parts = (None, *parts_for(reader.spec, stages, tp_size))
    written = [reader.weights(part) for part in parts]
    assert len(list(tmp_path.iterdir())) == reader.packed == len(parts)
    for part, expected in zip(parts, written, strict=True):
        found, wanted = tensors(reader.weights(part)), tensors(expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())
    assert reader.packed == len(parts), "all come from the cache now"


def test_weights_that_were_not_compared_are_not_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    reader = Reader(checkpoints("llama"), tmp_path)
    (part, _) = parts_for(reader.spec, 2)
    reader.weights(part, keep=False)
    assert not list(tmp_path.iterdir())


def test_other_cuts_are_other_weights(checkpoints: Checkpoints, tmp_path: Path) -> None:
    reader = Reader(checkpoints("llama"), tmp_path)
    (first, _) = parts_for(reader.spec, 2)
    for bounds in ((0, 1, 3), (0, 2, 3)):
        weights = reader.weights(replace(first, bounds=bounds))
        assert len(weights.layers) == bounds[1]
    assert reader.packed == 2

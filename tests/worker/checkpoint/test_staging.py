"""Reading weights through staging buffers gives the bytes that safetensors reads, in any order; errors name the place.

With a GPU, tensors are read onto the GPU through pinned buffers. Without a GPU, the buffers are plain memory, and all
else is the same.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from worker.checkpoint.checkpoint import DTYPES, Checkpoint, CheckpointError, read_config
from worker.checkpoint.staging import Buffer, Extent, Staging
from worker.models.config import spec_from_config
from worker.models.decoder import Weights
from worker.models.load import FileSource, Loader

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "a": (1000,), "b": (3, 7), "scalar": (), "none": (0, 4), "one": (1,), "exact": (32,), "c": (5, 333),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with tensors of every stored format, and of sizes around the size of a piece."""
    draw = torch.Generator().manual_seed(0)
    formats = [torch.float32, torch.float16, torch.bfloat16]
    state = {
        f"{name}.{stored}": torch.randn(shape, generator=draw).to(stored)
        for name, shape in SHAPES.items()
        for stored in formats
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def copied(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    into = torch.full(checkpoint.shape(name), float("nan"), device=HERE).to(dtype)
    checkpoint.copy(name, into)
    return into.cpu()


@pytest.fixture(params=["expected", "shuffled", "unexpected", "twice"])
def order(request: pytest.FixtureRequest, folder: Path) -> tuple[list[str], list[str]]:
    """Draws two orders of tensor names: the order in which they are announced, and the order in which they are read."""
    names = list(load_file(folder / "model.safetensors"))
    other = random.Random(1).sample(names, len(names))
    return {
        "expected": (names, names),
        "shuffled": (names, other),
        "unexpected": (names[:4], other),
        "twice": (names, names[:9] + names),
    }[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "as stored"])
@pytest.mark.parametrize(("piece", "buffers"), [(64, 3), (64, 1), (1 << 20, 4)])
def test_staged_tensors_equal_safetensors(
    folder: Path, order: tuple[list[str], list[str]], dtype: torch.dtype | None, piece: int, buffers: int
) -> None:
    state, (said, asked) = load_file(folder / "model.safetensors"), order
    with closing(Checkpoint(folder, Staging(HERE, piece=piece, buffers=buffers))) as checkpoint:
        checkpoint.expect(said)
        for name in asked:
            into = copied(checkpoint, name, dtype or DTYPES[checkpoint.format(name)])
            assert torch.equal(into, state[name].to(into.dtype)), name


def weights(folder: Path, staging: Staging | None, dtype: torch.dtype) -> Weights:
    with closing(Checkpoint(folder, staging)) as checkpoint:
        spec = spec_from_config(read_config(folder))
        return Loader(FileSource(checkpoint, None), spec, dtype, HERE, invariant=False).load()


def tensors(value: object) -> Iterator[Tensor]:
    """Yields all tensors in a dataclass, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from tensors(part)
    else:
        for name in getattr(value, "__dataclass_fields__", ()):
            yield from tensors(getattr(value, name))


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3-tied", "gemma3"])
@pytest.mark.parametrize("how", [{}, {"shard": "200KB"}], ids=["single", "sharded"])
def test_model_is_loaded_exactly_and_in_the_announced_order(
    checkpoints: Checkpoints, kind: str, how: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "_read_now", lambda *_: pytest.fail("this was not read ahead"))
    folder = checkpoints(kind, **how)
    plain = list(tensors(weights(folder, None, torch.float16)))
    staged = list(tensors(weights(folder, Staging(HERE, piece=4096, buffers=3), torch.float16)))
    assert len(plain) == len(staged) > 20 and all(map(torch.equal, plain, staged))


def test_reads_continue_between_copies_without_overwriting_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, together = threading.Barrier(3, lambda: together.append(1), timeout=PATIENCE_S), []
    fill = Buffer.fill

    def met(buffer: Buffer, extent: Extent) -> None:
        if not together:  # later reads do not wait: the last of them may never begin, because the staging is closed
            reading.wait()
        fill(buffer, extent)

    monkeypatch.setattr(Buffer, "fill", met)
    with (folder / "model.safetensors").open("rb") as file, closing(Staging(HERE, piece=8, buffers=3)) as staging:
        staging.expect([Extent(file.fileno(), at, 8) for at in range(0, 48, 8)])
        whole = torch.empty(24, dtype=torch.uint8, device=HERE)
        # returns only when three threads have arrived here
        staging.copy(Extent(file.fileno(), 0, 8), torch.uint8, whole[:8])
        assert len(together) == 1
        staging.copy(Extent(file.fileno(), 8, 8), torch.uint8, whole[8:16])
        staging.copy(Extent(file.fileno(), 16, 8), torch.uint8, whole[16:])
        assert whole.cpu().numpy().tobytes() == (folder / "model.safetensors").read_bytes()[:24]


def test_shrinking_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    with closing(Checkpoint(folder, Staging(HERE, piece=64, buffers=2))) as checkpoint:
        os.truncate(path, path.stat().st_size - 100)
        last = max(checkpoint.names(), key=lambda name: checkpoint._extent(name).offset)
        with pytest.raises(CheckpointError, match="the file ends early") as caught:
            copied(checkpoint, last, torch.float32)
    assert str(path) in str(caught.value) and last in str(caught.value)


def test_failing_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("worker.checkpoint.staging.os.preadv", fails)
    with closing(Checkpoint(folder, Staging(HERE, piece=64, buffers=2))) as checkpoint:
        checkpoint.expect(checkpoint.names())
        with pytest.raises(CheckpointError, match=r"a\.torch\.float32 cannot be read: Input/output error"):
            copied(checkpoint, "a.torch.float32", torch.float32)

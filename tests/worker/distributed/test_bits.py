"""Ranks, each a process, that compute a model together with gloo: the bits of one process with the same operations."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.e2e.server import free_port
from tests.patience import PATIENCE_S
from tests.worker.distributed.rank import Job, Model, whole
from tests.worker.models.quantized_checkpoints import gptq, rewrite
from tests.worker.ops.harness.cpu_tiers import needs_library

ROOT = Path(__file__).parents[3]
# Four ranks share the two key heads of these models.
OF_FOUR = ("llama-biased", "qwen3", "gpt-oss", "gemma3")
OF_TWO = ("gemma4", "gemma4-moe", "qwen2-moe", "qwen3_5", "lfm2-moe", "cohere2")

pytestmark = needs_library


@pytest.fixture(scope="module")
def models(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The models by their names in a failure."""
    found = {
        f"{kind} {dtype}": Model(str(checkpoints(kind)), dtype) for kind in OF_FOUR + OF_TWO for dtype in ("bfloat16",)
    }
    found["llama float32"] = Model(str(checkpoints("llama")), "float32")
    copy = Path(shutil.copytree(checkpoints("llama"), tmp_path_factory.mktemp("gptq") / "m"))
    found["llama gptq"] = Model(str(rewrite(copy, gptq(act_order=True))), "bfloat16")
    found["llama int4-g32"] = Model(str(checkpoints("llama")), "bfloat16", "int4-g32")
    return found


@pytest.fixture(scope="module")
def expected(models: dict[str, Model]) -> dict[str, list[Tensor]]:
    return {name: whole(model) for name, model in models.items()}


def computed(models: list[Model], count: int, folder: Path) -> list[list[list[Tensor]]]:
    """Returns the logits of each step, of each model, of each rank."""
    port = free_port()
    jobs = [Job(models, rank, count, port, str(folder / f"{rank}.pt")) for rank in range(count)]
    words = [[sys.executable, "-m", "tests.worker.distributed.rank", msgspec.json.encode(job).decode()] for job in jobs]
    processes = [subprocess.Popen(each, cwd=ROOT, stderr=subprocess.PIPE, text=True) for each in words]
    for process in processes:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    return [torch.load(job.out) for job in jobs]


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_give_the_bits_of_one_process(
    models: dict[str, Model], expected: dict[str, list[Tensor]], count: int, tmp_path: Path
) -> None:
    chosen = {name: model for name, model in models.items() if (name.split()[0] in OF_FOUR) == (count == 4)}
    assert len(chosen) >= len(OF_FOUR)
    for rank, found in enumerate(computed([*chosen.values()], count, tmp_path)):
        for name, steps in zip(chosen, found, strict=True):
            for number, (logits, wanted) in enumerate(zip(steps, expected[name], strict=True)):
                assert torch.equal(logits, wanted), (name, rank, number)

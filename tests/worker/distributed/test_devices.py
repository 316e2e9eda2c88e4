"""Each rank of a machine has a GPU of its own, and more ranks than GPUs are refused."""

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.distributed import nccl
from worker.distributed.nccl import check_count, check_features, device_of_rank


def test_ranks_on_the_cpu_share_it() -> None:
    assert device_of_rank(WorkerConfig(device="cpu", tensor_parallel_size=8), 7) == torch.device("cpu")


def test_a_rank_tries_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that tries another GPU takes memory of it for good."""
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(nccl, "pick_device", lambda name: done.append(name) or torch.device("cuda"))
    assert device_of_rank(WorkerConfig(tensor_parallel_size=4), 3) == torch.device("cuda", 3)
    assert done == [3, "auto"]


@pytest.mark.parametrize(
    ("tp_size", "stages", "here", "found", "words"),
    [
        (4, 1, 0, 2, "--tensor-parallel-size 4 needs 4 GPUs, one for each process, and there are 2"),
        (1, 2, 0, 1, "--pipeline-parallel-size 2 needs 2 GPUs, one for each process, and there is 1"),
        (2, 2, 0, 3, "--tensor-parallel-size 2 times --pipeline-parallel-size 2 needs 4 GPUs"),
        (8, 1, 4, 2, "--tensor-parallel-size 8 needs 4 GPUs on this machine, one for each process, and there are 2"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    tp_size: int, stages: int, here: int, found: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker = WorkerConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=stages)
    with pytest.raises(ConfigError) as refused:
        check_count(worker, found, here)
    assert str(refused.value).startswith(words)
    check_count(worker, here or tp_size * stages, here)


def test_a_refusal_names_the_variable_that_hides_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"there is 1 \(CUDA_VISIBLE_DEVICES is '0'\); use fewer processes, or"):
        check_count(WorkerConfig(tensor_parallel_size=2), 1)


def test_features_that_were_not_tried_on_several_gpus_are_refused() -> None:
    worker = WorkerConfig(tensor_parallel_size=2)
    check_features(ModelConfig(), worker)
    with pytest.raises(ConfigError, match="--allow-runtime-lora does not work with --tensor-parallel-size above 1 on"):
        check_features(ModelConfig(allow_runtime_lora=True), worker)

"""Chooses the GPU of a rank: on each machine, the first rank has the first GPU, and so on."""

import os

import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from worker.model.device import pick_device
from worker.ranks.frames import IN_C, ON_GPUS


def device_of_rank(worker: WorkerConfig, place: int = 0, here: int = 0) -> torch.device:
    """Returns the device of one of several ranks. A GPU becomes the current one of this thread.

    place: the index of the rank among the `here` ranks of this machine; here 0: all ranks are on it. On the CPU, ranks
    share the device. Raises ConfigError if there are fewer GPUs than ranks, and what pick_device() raises.
    """
    if worker.device != "cpu" and place < torch.cuda.device_count():
        torch.cuda.set_device(place)  # first of all: pick_device() takes memory of the current GPU
    device = pick_device(worker.device)
    if device.type != "cuda":
        return device
    check_count(worker, torch.cuda.device_count(), here)
    return torch.device("cuda", place)


def check_count(worker: WorkerConfig, found: int, here: int = 0) -> None:
    """Raises ConfigError if there are fewer GPUs on this machine than ranks. See device_of_rank."""
    needed = here or worker.ranks
    if found >= needed:
        return
    sizes = {
        "--tensor-parallel-size": worker.tensor_parallel_size,
        "--pipeline-parallel-size": worker.pipeline_parallel_size,
    }
    flags = " times ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    there = " on this machine" if here else ""
    raise ConfigError(
        f"{flags} needs {needed} GPUs{there}, one for each process, and there {'is' if found == 1 else 'are'} "
        f"{found}{named}; use fewer processes, or --device cpu"
    )


def check_features(model: ModelConfig, worker: WorkerConfig) -> None:
    """Raises ConfigError for settings that several GPUs computing one model together do not support."""
    given = {
        "--lora-modules": model.lora_modules, "--allow-runtime-lora": model.allow_runtime_lora,
        "--expert-metrics": worker.expert_metrics,
    }  # fmt: skip
    if wrong := next((flag for flag, value in given.items() if value), ""):
        raise ConfigError(f"{wrong} does not work with {worker.ranks_flag} above 1 on GPUs; leave one of both out")


def exchange_on(device: torch.device) -> str:
    """Returns how ranks with this device exchange columns: a value of Beginning.exchange (frames.py)."""
    return ON_GPUS if device.type == "cuda" else IN_C

"""Chooses the device. If the requested device cannot be used, one sentence explains why."""

import logging
import os
from dataclasses import replace

import torch

from shared.config.declaration import ConfigError
from shared.config.worker import WorkerConfig
from shared.machine import visible_gpus
from worker.ops.quantized_weight import FORMATS, Scheme

log = logging.getLogger("sluice.load")

# The lowest compute capability that the Triton kernels compile well for. On an older GPU (Turing, such as a T4), Triton
# has no tensor cores: products spill 8 KB a thread, and attention takes more shared memory than there is.
MIN_KERNEL_CAPABILITY = (8, 0)
MIN_CAPABILITY = {  # for each format: the lowest compute capability that has it, and what to choose on older GPUs
    torch.bfloat16: ((8, 0), "--dtype float16"),
    torch.float8_e4m3fn: ((8, 9), "--kv-cache-dtype auto"),
}
# the lowest compute capability with matrix products in each format
MIN_MATMUL_CAPABILITY = {torch.int8: (8, 0), torch.float8_e4m3fn: (8, 9)}


def pick_device(name: str) -> torch.device:
    """Returns the device called `name`. "auto" chooses a GPU if there is one.

    Raises ConfigError when a GPU is requested or chosen but cannot compute.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if name == "auto" and visible_gpus():
            log.warning("there is a GPU, but it cannot be used: %s", _why_no_cuda())
        return torch.device("cpu")
    if reason := _why_no_cuda():
        raise ConfigError(f"--device {name}: {reason}")
    return torch.device("cuda")


def check_kernels(device: torch.device, kernels: str) -> None:
    """Raises ConfigError when the GPU is too old for the Triton kernels. kernels: the value of --kernels"""
    if device.type != "cuda" or kernels == "torch":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_KERNEL_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and the kernels for GPUs "
            "need 8.0: choose --device cpu, or --kernels torch for plain PyTorch, which is slower"
        )


def check_format(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError when the GPU is too old for the number format."""
    if device.type != "cuda" or dtype not in MIN_CAPABILITY:
        return
    needed, instead = MIN_CAPABILITY[dtype]
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < needed:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"{str(dtype).removeprefix('torch.')} needs {needed[0]}.{needed[1]}: choose {instead}"
        )


def computable(scheme: Scheme | None, device: torch.device, flag: str) -> Scheme | None:
    """Returns the scheme. If the GPU is too old to quantize inputs dynamically, the returned scheme does not quantize
    inputs.

    flag: the value of --quantization. Raises ConfigError if the flag asks for dynamic quantization on an older GPU.
    """
    if scheme is None or not scheme.dynamic or device.type != "cuda":
        return scheme
    needed = MIN_MATMUL_CAPABILITY[FORMATS[scheme.kind]]
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= needed:
        return scheme
    if flag != "auto":
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and --quantization {flag} "
            f"needs {needed[0]}.{needed[1]}: choose --quantization {scheme.kind}"
        )
    return replace(scheme, dynamic=False)


def _why_no_cuda() -> str:
    """Returns the reason why CUDA cannot be used, or "" if it can be used."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible_gpus():
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which leaves no GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _try_cuda()
    except (RuntimeError, AssertionError) as error:
        return _reason(str(error))
    return ""


def _try_cuda() -> None:
    """Raises an exception if another process has the GPU or all of its memory, or if PyTorch was not compiled for the
    GPU.
    """
    torch.ones(1, device="cuda").add_(1).item()


def _reason(message: str) -> str:
    """Returns the reason in an error message of PyTorch, without the advice that follows it.

    If the message has an error number, the reason is the text from there on, for example "Error 803: …". Otherwise
    the reason is the first sentence.
    """
    _, error, code = message.partition(" Error ")
    reason = error.strip() + " " + code if error else message.partition(". ")[0]
    return (reason.strip().splitlines() or ["CUDA does not start"])[0].rstrip(".")


def threads_of(worker: WorkerConfig, ranks: int = 0) -> int:
    """Returns the CPU threads of one process: --threads, or one per core, divided among the ranks of this machine.

    ranks: the number of ranks on this machine; 0: all ranks are on this machine
    """
    cores = worker.threads or len(os.sched_getaffinity(0))
    return max(1, cores // (ranks or worker.ranks))

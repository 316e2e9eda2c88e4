"""Which device computes and, in one sentence, why it cannot be the one that is asked for."""

import logging
import os
from dataclasses import replace

import torch

from shared.config import ConfigError
from shared.machine import visible_gpus
from worker.kernels.quantize import FORMATS, Scheme

log = logging.getLogger("sluice.load")

SINCE = {  # the first compute capability with it, and what to choose on older ones
    torch.bfloat16: ((8, 0), "--dtype float16 or --device cpu"),
    torch.float8_e4m3fn: ((8, 9), "--kv-cache-dtype auto"),
}
MULTIPLIES = {torch.int8: (8, 0), torch.float8_e4m3fn: (8, 9)}  # compute capability with products of such numbers


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one. Raises ConfigError when a GPU is asked for, or found, and cannot compute."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if name == "auto" and visible_gpus():
            log.warning("there is a GPU, but it cannot be used: %s", _why_no_cuda())
        return torch.device("cpu")
    if why := _why_no_cuda():
        raise ConfigError(f"--device {name}: {why}")
    return torch.device("cuda")


def check_format(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError when the GPU is too old for the number format."""
    if device.type != "cuda" or dtype not in SINCE:
        return
    needed, instead = SINCE[dtype]
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < needed:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"{str(dtype).removeprefix('torch.')} needs {needed[0]}.{needed[1]}: choose {instead}"
        )


def computable(scheme: Scheme | None, device: torch.device, flag: str) -> Scheme | None:
    """The scheme without dynamic inputs where the GPU is too old for them.

    Raises ConfigError if they are what --quantization, the `flag`, asks for.
    """
    if scheme is None or not scheme.dynamic or device.type != "cuda":
        return scheme
    needed = MULTIPLIES[FORMATS[scheme.kind]]
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
    """Why there is no CUDA; empty: there is."""
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible_gpus():
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which leaves no GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _compute()
    except (RuntimeError, AssertionError) as error:
        return _first_words(str(error))
    return ""


def _compute() -> None:
    """Fails where another process has the GPU, or all of its memory, or where PyTorch was not compiled for it."""
    torch.ones(1, device="cuda").add_(1).item()


def _first_words(said: str) -> str:
    """PyTorch's reason without its advice: from "Error 803: …" on where there is such a number, else one sentence."""
    _, error, code = said.partition(" Error ")
    reason = error.strip() + " " + code if error else said.partition(". ")[0]
    return (reason.strip().splitlines() or ["CUDA does not start"])[0].rstrip(".")

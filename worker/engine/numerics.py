"""Chooses the number formats of a model: for computation, for the K/V cache and for quantized weights."""

import logging
from dataclasses import dataclass, replace

import torch

from shared.config import ConfigError, WorkerConfig
from worker.kernels.cpu import bindings
from worker.kernels.operations import TORCH
from worker.kv_cache.tensors import kv_format
from worker.model.decoder import Decoder
from worker.model.device import check_format, check_kernels, computable
from worker.model.quantization.in_memory import InMemory, describe, in_memory
from worker.spec import ModelSpec

log = logging.getLogger("sluice.load")


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats of a model.

    dtype: the format that the model computes in; kv_dtype: the format of the K/V cache; memory: how weights of linear
    layers are stored in memory.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    memory: InMemory

    @property
    def all_in_c(self) -> bool:
        """Whether the C kernels for CPUs compute everything. Then the bits of a row do not depend on the other rows."""
        return bindings.available(self.dtype) and (self.kv_dtype is self.dtype or self.kv_dtype in bindings.EIGHT_BITS)


def choose_formats(spec: ModelSpec, worker: WorkerConfig, device: torch.device) -> Formats:
    """Chooses the number formats (weights, K/V cache, quantization) from the flags and the checkpoint.

    Raises ConfigError when the flags do not fit the checkpoint or the device.
    """
    dtype = _weights_dtype(spec, worker.dtype, device)
    kv_dtype = kv_format(worker.kv_cache_dtype, dtype)
    if device.type == "cuda" and kv_dtype == torch.int8:
        raise ConfigError("--kv-cache-dtype int8 is for the CPU: on a GPU, choose fp8 or auto")
    check_kernels(device, worker.kernels)
    for needed in (dtype, kv_dtype):
        check_format(device, needed)
    memory = in_memory(spec.stored, worker.quantization, device)
    memory = replace(memory, by_row=computable(memory.by_row, device, worker.quantization))
    if quantized := describe(spec.stored, memory, dtype, worker.quantization):
        log.info("%s", quantized)
    return Formats(dtype, kv_dtype, memory)


def _weights_dtype(spec: ModelSpec, flag: str, device: torch.device) -> torch.dtype:
    """Returns the format that the flag names, or with "auto", the format of the checkpoint.

    On the CPU, "auto" replaces float16 by float32, because there are no float16 kernels.
    """
    if flag == "auto" and spec.dtype == "float16" and device.type == "cpu":
        log.info("the checkpoint's float16 is computed in float32 here; --dtype bfloat16 takes half the memory")
        return torch.float32
    dtype: torch.dtype = getattr(torch, spec.dtype if flag == "auto" else flag)
    return dtype


def warn_about_cpu(worker: WorkerConfig, formats: Formats) -> None:
    """Logs which flags have no effect on the CPU, and which computations have no C kernel and run in plain PyTorch."""
    if worker.kernels != "auto":
        log.warning(
            "--kernels %s is for GPUs: the CPU has C kernels, or plain PyTorch with SLUICE_NATIVE=0", worker.kernels
        )
    if worker.batch_invariant and not bindings.available(formats.dtype):
        log.warning(
            "--batch-invariant: there are no C kernels for %s here, so bits may depend on the other requests of a step",
            formats.dtype,
        )
    if formats.kv_dtype is not formats.dtype and not formats.all_in_c:
        log.warning(
            "--kv-cache-dtype saves memory here, not time: plain PyTorch computes attention because there are no C "
            "kernels for %s, and bits may depend on the other requests of a step", formats.dtype,
        )  # fmt: skip


def dtype_name(dtype: torch.dtype, memory: InMemory) -> str:
    """Returns the name of the format of the weights in memory, as Status reports it."""
    plain = str(dtype).removeprefix("torch.")
    return f"{plain}, {memory.name} weights" if memory.name else plain


def kernels_name(decoder: Decoder, dtype: torch.dtype) -> str:
    """Returns the kind of kernels that compute the model, as Status reports it."""
    if decoder.operations is TORCH:
        return "torch"
    if decoder.weights.embed.is_cuda:
        return "triton"
    return "c" if bindings.available(dtype) else "torch"

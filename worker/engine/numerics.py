"""Chooses the number formats of a model, and hashes what decides the bits of its answers."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any

import torch

from shared.build import fingerprint_of
from shared.config.declaration import ConfigError
from shared.config.worker import WorkerConfig
from worker.device import check_format, check_kernels, computable
from worker.kv_cache.tensors import kv_format
from worker.models.decoder import Decoder, centred_over
from worker.operations import TORCH
from worker.ops import native as c_library
from worker.ops import paged_kv
from worker.ops.native_build import EXTENDS, SAME_BITS
from worker.quantization.methods import InMemory, describe, in_memory
from worker.spec import ATTENTION, ModelSpec

log = logging.getLogger("sluice.load")


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats of a model.

    dtype: the format that the model computes in; kv_dtype: the format of the K/V cache, as kv_format() returns it;
    memory: how weights of linear layers are stored in memory; kv_name: the name of the K/V cache's format.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    memory: InMemory
    kv_name: str

    @property
    def all_in_c(self) -> bool:
        """Whether the C kernels for CPUs compute everything. Then the bits of a row do not depend on the other rows."""
        return c_library.available(self.dtype) and (self.kv_dtype is self.dtype or self.kv_dtype in paged_kv.CODED)


def choose_formats(spec: ModelSpec, worker: WorkerConfig, device: torch.device) -> Formats:
    """Chooses the number formats (weights, K/V cache, quantization) from the flags and the checkpoint.

    Raises ConfigError when the flags do not fit the checkpoint or the device.
    """
    dtype = _weights_dtype(spec, worker.dtype, device)
    kv_dtype = kv_format(worker.kv_cache_dtype, dtype)
    if device.type == "cuda" and spec.latent is not None:
        raise ConfigError(
            f"--device {worker.device}: this model ({spec.model_type}) has multi-head latent attention, which is "
            "computed on CPUs only: choose --device cpu"
        )
    if device.type == "cuda" and worker.kv_cache_dtype in ("int8", "int4"):
        raise ConfigError(f"--kv-cache-dtype {worker.kv_cache_dtype} is for the CPU: on a GPU, choose fp8 or auto")
    if kv_dtype == paged_kv.FOUR_BITS and spec.latent is not None:
        raise ConfigError(
            f"--kv-cache-dtype int4 keeps values in four bits, keys in eight, and this model ({spec.model_type}) has "
            "multi-head latent attention, whose keys are the values, too: choose int8"
        )
    if device.type == "cuda" and worker.activations == "int8":
        raise ConfigError("--activations int8 is for the CPU: on a GPU, choose --quantization int8-dynamic")
    check_kernels(device, worker.kernels)
    for needed in (dtype, kv_dtype):
        check_format(device, needed)
    memory = in_memory(spec.stored, worker.quantization, device)
    memory = replace(memory, by_row=computable(memory.by_row, device, worker.quantization))
    if worker.activations == "int8" or (worker.activations == "auto" and _rounds_inputs(spec, memory, dtype, device)):
        memory = _with_int8_inputs(memory, dtype)
    if quantized := describe(spec.stored, memory, dtype, worker.quantization):
        log.info("%s", quantized)
    return Formats(dtype, kv_dtype, memory, paged_kv.name_of(kv_dtype, centred_over(spec)))


def _rounds_inputs(spec: ModelSpec, memory: InMemory, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether inputs are rounded to 8 bits by default: those of weights in a GGUF file, as llama.cpp does.

    Only processors on which that was measured to be faster do so.
    """
    in_blocks = spec.stored is not None and spec.stored.activations == "blocks" and not memory.widen
    fast = device.type == "cpu" and c_library.available(dtype) and c_library.tier() == "avx512bf16"
    return in_blocks and fast and dtype == torch.bfloat16


def _with_int8_inputs(memory: InMemory, dtype: torch.dtype) -> InMemory:
    """Returns how linears are kept in memory on the CPU with --activations int8. Without weights in few bits, nothing
    changes.

    Raises ConfigError where no kernel rounds activations so.
    """
    if not c_library.available(dtype):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--activations int8 needs the C kernels, which do not compute {name} here")
    if memory.kind and not memory.widen:
        return replace(memory, activations="int8")
    log.warning("--activations int8 has no effect: no weights are in few bits")
    return memory


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
    if worker.batch_invariant and not c_library.available(formats.dtype):
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
    """Returns the name of the format of the weights in memory, and of activations that are rounded to fewer bits, as
    Status reports it."""
    plain = str(dtype).removeprefix("torch.")
    if not memory.name:
        return plain
    return f"{plain}, {memory.name} weights" + (f", {memory.activations} activations" if memory.int8_inputs else "")


def kernels_name(decoder: Decoder, dtype: torch.dtype) -> str:
    """Returns the kind of kernels that compute the model, as Status reports it."""
    if decoder.operations is TORCH:
        return "torch"
    if decoder.weights.embed.is_cuda:
        return "triton"
    return "c" if c_library.available(dtype) else "torch"


# The fingerprint of a worker: a hash of everything that decides the bits that it computes.
#
# Settings that only decide when something is computed are left out: sizes of batches, chunks and pages, caches,
# threads, speculation, CUDA graphs. Limits are left out, too, because they refuse or end an answer, but change no
# token of it.

# Raise this number with every change to kernels, sampling or quantization after which the same request may get other
# bits.
ARITHMETIC_VERSION = 2
# torch computes the probabilities, and llguidance decides which tokens a grammar allows.
LIBRARIES = ("torch", "llguidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How numbers are computed. If one of these fields differs, the results may differ in their last bits."""

    kernels: str  # "c", "triton" or "torch"
    processor: str  # the instruction sets that C and torch use, or the GPU
    dtype: str
    kv_dtype: str
    memory: InMemory
    batch_invariant: bool
    libraries: dict[str, str] = field(default_factory=lambda: {name: _release(name) for name in LIBRARIES})


def fingerprint(weights: Sequence[str], tokenizer: str, spec: ModelSpec, numerics: Numerics, vision: Any = None) -> str:
    """Returns the worker's fingerprint.

    weights, tokenizer: the hashes of the files; the weights' files include those of a vision tower
    vision: the VisionSpec, with the normalization of pixels; None if images are not served
    """
    facts = [ARITHMETIC_VERSION, list(weights), tokenizer, _facts_of(spec), numerics]
    return fingerprint_of(facts if vision is None else [*facts, vision])


def _facts_of(spec: ModelSpec) -> Any:
    """Returns the facts of a spec to hash. A state that all recurrent layers share is hashed once.

    Earlier versions hashed states this way, because models had one kind of state. Old receipts must stay valid.
    """
    states = {layer.state for layer in spec.layers if layer.state is not None}
    if len(states) != 1:
        return spec
    layers = [_stated(replace(layer, mixer=ATTENTION, state=None)) for layer in spec.layers]
    for facts, layer in zip(layers, spec.layers, strict=True):
        facts |= {"recurrent": True} if layer.recurrent else {}
    return _stated(spec) | {"layers": layers, "recurrent": states.pop()}


def _stated(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that do not have their defaults."""
    return {one.name: value for one in fields(record) if (value := getattr(record, one.name)) != one.default}


def numerics_of(kernels: str, formats: Formats, device: torch.device, *, batch_invariant: bool) -> Numerics:
    """Returns the numerics of a loaded model. kernels: the result of formats.kernels_name()."""
    return Numerics(
        kernels=kernels,
        processor=_processor(device, formats.dtype),
        dtype=str(formats.dtype),
        kv_dtype=formats.kv_name,
        memory=formats.memory,
        batch_invariant=batch_invariant,
    )


def _processor(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    ours = c_library.instruction_sets(dtype) if c_library.available(dtype) else ()
    return ", ".join(
        [*(EXTENDS[one] if one in SAME_BITS else one for one in ours), torch.backends.cpu.get_cpu_capability()]
    )


def _release(library: str) -> str:
    """Returns the version of a library without the name of the build, which follows a `+`."""
    return re.sub(r"\+.*", "", version(library))

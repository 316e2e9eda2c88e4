"""The fingerprint of a worker: a hash of everything that decides the bits that it computes.

Settings that only decide when something is computed are left out: sizes of batches, chunks and pages, caches, threads,
speculation, CUDA graphs. Limits are left out, too, because they refuse or end an answer, but change no token of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any

import torch

from shared.fingerprint import fingerprint_of
from worker.engine.formats import Formats
from worker.kernels.cpu import bindings
from worker.kernels.cpu.instruction_set import EXTENDS, SAME_BITS
from worker.model.quantization.in_memory import InMemory
from worker.spec import ATTENTION, ModelSpec

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
    vision: the VisionSpec, with the normalization of pixels; None if pictures are not served
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
        kv_dtype=str(formats.kv_dtype),
        memory=formats.memory,
        batch_invariant=batch_invariant,
    )


def _processor(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    ours = bindings.instruction_sets(dtype) if bindings.available(dtype) else ()
    return ", ".join(
        [*(EXTENDS[one] if one in SAME_BITS else one for one in ours), torch.backends.cpu.get_cpu_capability()]
    )


def _release(library: str) -> str:
    """Returns the version of a library without the name of the build, which follows a `+`."""
    return re.sub(r"\+.*", "", version(library))

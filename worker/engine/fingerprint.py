"""What decides the bits that a worker computes, as one record, and its fingerprint.

Everything that only decides when something is computed is left out: sizes of batches, chunks and pages, caches,
threads, speculation, CUDA graphs. Limits are left out, too: they refuse or end an answer, and change no token of it.
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

# Raise it with every change after which the same request may get other bits: of a kernel, of how tokens are drawn, or
# of how weights are quantized.
ARITHMETIC_VERSION = 2
# torch computes the probabilities, and llguidance decides which tokens a grammar allows.
LIBRARIES = ("torch", "llguidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How numbers are computed. The same operation has other bits in another implementation or on another processor."""

    kernels: str  # "c", "triton" or "torch"
    processor: str  # the instruction sets that C and torch use, or the GPU
    dtype: str
    kv_dtype: str
    memory: InMemory
    batch_invariant: bool
    libraries: dict[str, str] = field(default_factory=lambda: {name: _release(name) for name in LIBRARIES})


def fingerprint(weights: Sequence[str], tokenizer: str, spec: ModelSpec, numerics: Numerics, vision: Any = None) -> str:
    """Returns the worker's fingerprint.

    weights, tokenizer: the hashes of the files, of which those of the weights cover a vision tower, too
    vision: the VisionSpec, with how pixels are normalized; None if pictures are not served
    """
    facts = [ARITHMETIC_VERSION, list(weights), tokenizer, _facts_of(spec), numerics]
    return fingerprint_of(facts if vision is None else [*facts, vision])


def _facts_of(spec: ModelSpec) -> Any:
    """Returns the facts of a spec. A state that all recurrent layers share is stated once, as a fact of the model.

    Earlier versions had it so, because their models could not mix kinds, and old receipts must keep their hash.
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
    """Returns the numerics of a loaded model. kernels: as `kernels_name` names them."""
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
    """Returns the version without what follows `+`, which names the build."""
    return re.sub(r"\+.*", "", version(library))

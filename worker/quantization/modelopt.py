"""Reads checkpoints with `quant_method: modelopt`, as NVIDIA's library exports them, in NVFP4, FP8 and MXFP8.

Older exports have the settings in hf_quant_config.json alone (see read_config in worker/checkpoint/checkpoint.py). A
weight's own tensors tell its format. Scales of activations and of K/V are not read: activations keep 16 bits, and K/V
the server's format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import Shape, StoredTensors, StoredWeight
from worker.quantization.fp8 import Block, scaled_weight
from worker.quantization.mxfp4 import mxfp8_weight
from worker.quantization.nvfp4 import GROUP, modelopt_weight
from worker.spec import StoredQuantization

METHOD, MIXED = "modelopt", "MIXED_PRECISION"
Config = Mapping[str, Any]
ALGORITHMS: Mapping[str, StoredQuantization] = {
    "NVFP4": StoredQuantization("nvfp4", "16 values", activations="other"),
    "W4A16_NVFP4": StoredQuantization("nvfp4", "16 values"),
    "FP8": StoredQuantization("fp8", "a tensor", True, "other"),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredQuantization("fp8", "a row", True, "dynamic"),
    "MXFP8": StoredQuantization("mxfp8", "32 values", activations="other"),
}


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """The settings of a modelopt checkpoint. A linear is quantized if the checkpoint has its scales."""

    stored: StoredQuantization

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None:
        scale = f"{name}_scale"
        if name not in tensors or scale not in tensors:
            return None
        if tensors.format(name) == "U8":
            return modelopt_weight(name, shape, tensors)
        if tensors.format(scale) == "U8":
            return mxfp8_weight(name, shape, tensors)
        return scaled_weight(name, shape, tensors, scale, Block(0, 0))


def read(settings: Config) -> ModelOpt:
    """Reads a quantization_config. Raises CheckpointError, which names the algorithm, if one is not supported."""
    own: Config = settings.get("quantization") or settings
    layers = (own.get("quantized_layers") or {}).values() if own.get("quant_algo") == MIXED else (own,)
    found = [_algorithm(layer) for layer in layers]
    if not found:
        raise CheckpointError(f"quant_method {METHOD!r}: {MIXED} names no quantized_layers")
    return ModelOpt(StoredQuantization.of_all(list(dict.fromkeys(found))))


def _algorithm(layer: Config) -> StoredQuantization:
    name = layer.get("quant_algo")
    stored = ALGORITHMS.get(str(name))
    if stored is None:
        raise CheckpointError(
            f"quant_method {METHOD!r}: quant_algo {name!r} is not supported; supported are {', '.join(ALGORITHMS)} and "
            f"{MIXED} of these"
        )
    size = layer.get("group_size")
    if stored.kind == "nvfp4" and size not in (None, GROUP):
        raise CheckpointError(f"quant_method {METHOD!r}: group_size {size!r} of {name} is not supported; it is {GROUP}")
    return stored

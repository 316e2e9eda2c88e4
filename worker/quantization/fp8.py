"""Reads checkpoints with `quant_method: fp8`, as of Qwen and DeepSeek: e4m3 codes, and a scale per tensor or block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.kernels.weights.quantized_weight import E4M3
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import ExpectedTensor, Shape, StoredTensors
from worker.model.quantization.scaled import Block, ScaledWeight, block_of
from worker.spec import Activations, StoredQuantization


@dataclass(frozen=True, slots=True)
class Fp8:
    """The settings of an fp8 checkpoint. A linear is quantized if the checkpoint has its scales."""

    block: Block
    activations: Activations

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization("fp8", str(self.block), self.block.by_row, self.activations)

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> ScaledWeight | None:
        scale = next((name + ending for ending in ("_scale", "_scale_inv") if name + ending in tensors), "")
        if not scale:
            return None
        return ScaledWeight(
            name, shape, tensors, self.block, E4M3, 0, ExpectedTensor(name, shape, ("F8_E4M3",)),
            ExpectedTensor(scale, self.block.grid_shape(shape, tensors.shape(scale))),
        )  # fmt: skip


def read(settings: Mapping[str, Any]) -> Fp8:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quant_method 'fp8': fmt {settings['fmt']!r} is not supported; supported is e4m3")
    block = block_of(settings.get("weight_block_size"), "fp8")
    tokens = settings.get("activation_scheme", "dynamic") == "dynamic" and block.by_row
    return Fp8(block, "dynamic" if tokens else "other")

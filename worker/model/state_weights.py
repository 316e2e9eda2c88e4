"""The small weights of recurrent layers beside their linears and norms, whatever kind of layer they are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.kernels.delta_net import DeltaNetShape, DeltaNetWeights
from worker.kernels.mamba2 import Mamba2Shape, Mamba2Weights
from worker.model.delta_modules import delta_vectors, delta_weights
from worker.model.mamba_modules import mamba_vectors, mamba_weights
from worker.model.spec import LayerSpec, ModelSpec
from worker.model.stored_weight import PlainWeight


def state_vectors(spec: ModelSpec, layer: LayerSpec, prefix: str) -> dict[str, PlainWeight]:
    """Returns what the checkpoint must hold, by field of the weights; nothing for other layers."""
    match spec.recurrent if layer.recurrent else None:
        case DeltaNetShape() as shape:
            return delta_vectors(shape, prefix)
        case Mamba2Shape() as shape:
            return mamba_vectors(shape, prefix)
    return {}


def state_weights(
    spec: ModelSpec, stored: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, DeltaNetWeights | Mamba2Weights]:
    """Returns a field of Layer from the tensors of state_vectors, read in float32. dtype: that of the model."""
    match spec.recurrent if stored else None:
        case DeltaNetShape():
            return {"delta": delta_weights(stored, dtype)}
        case Mamba2Shape():
            return {"mamba": mamba_weights(stored, dtype)}
    return {}

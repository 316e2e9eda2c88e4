"""Which modules of a checkpoint a Mamba-2 layer consists of."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from worker.kernels.mamba2 import Mamba2Shape, Mamba2Weights
from worker.model.stacked_linear import WEIGHT, StackedLinear
from worker.model.stored_weight import PlainWeight

MODULE = "mamba."


def mamba_linears(shape: Mamba2Shape, hidden: int) -> dict[str, StackedLinear]:
    """Returns the linears by field of Layer. The last rows of `qkv` are those of `gates`."""
    rows = sum(shape.projected) + shape.heads
    return {
        "qkv": StackedLinear((f"{MODULE}in_proj",), (rows,), hidden, False, apart=shape.heads),
        "o": StackedLinear((f"{MODULE}out_proj",), (hidden,), shape.values, False),
    }


def mamba_vectors(shape: Mamba2Shape, prefix: str) -> dict[str, PlainWeight]:
    """Returns the small weights by field of Mamba2Weights."""
    return {
        "conv": PlainWeight(f"{prefix}{MODULE}conv1d{WEIGHT}", (shape.channels, 1, shape.taps)),
        "conv_bias": PlainWeight(f"{prefix}{MODULE}conv1d.bias", (shape.channels,)),
        "decay": PlainWeight(f"{prefix}{MODULE}A_log", (shape.heads,)),
        "dt_bias": PlainWeight(f"{prefix}{MODULE}dt_bias", (shape.heads,)),
        "skip": PlainWeight(f"{prefix}{MODULE}D", (shape.heads,)),
        "norm": PlainWeight(f"{prefix}{MODULE}norm{WEIGHT}", (shape.values,)),
    }


def mamba_weights(stored: Mapping[str, Tensor], dtype: torch.dtype) -> Mamba2Weights:
    """Returns the small weights from those of mamba_vectors, which were read in float32. dtype: that of the model."""
    change: Mapping[str, Callable[[Tensor], Tensor]] = {
        "conv": lambda kernels: kernels[:, 0].T.contiguous(),
        "decay": lambda log: -log.exp(),
        "norm": lambda norm: norm.to(dtype),
    }
    return Mamba2Weights(**{field: change.get(field, _same)(vector) for field, vector in stored.items()})


def _same(vector: Tensor) -> Tensor:
    return vector

"""Which modules of a checkpoint a layer with a recurrent state consists of (Gated DeltaNet)."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from worker.kernels.delta_net import DeltaNetShape, DeltaNetWeights
from worker.model.stacked_linear import WEIGHT, StackedLinear
from worker.model.stored_weight import PlainWeight

MODULE = "linear_attn."
INTERLEAVED = f"{MODULE}in_proj_qkvz", f"{MODULE}in_proj_ba"  # Qwen3-Next


def delta_linears(shape: DeltaNetShape, hidden: int, interleaved: Collection[str]) -> dict[str, StackedLinear]:
    """Returns the linears by field of Layer: `qkv`, `gates` and `o`.

    interleaved: those of INTERLEAVED that the checkpoint has. Their rows are stored key head by key head, each with
    those of its value heads.
    """
    rows, count = (shape.channels, shape.values), (shape.value_heads, shape.value_heads)
    linears = {
        "qkv": StackedLinear((f"{MODULE}in_proj_qkv", f"{MODULE}in_proj_z"), rows, hidden, False),
        "gates": StackedLinear((f"{MODULE}in_proj_b", f"{MODULE}in_proj_a"), count, hidden, False, exact=True),
        "o": StackedLinear((f"{MODULE}out_proj",), (hidden,), shape.values, False),
    }
    inputs, gates = INTERLEAVED
    if inputs in interleaved:
        values = shape.values // shape.key_heads
        order = _by_kind(shape.key_heads, (shape.key_dim, shape.key_dim, values, values))
        linears["qkv"] = StackedLinear((inputs,), (sum(rows),), hidden, False, order)
    if gates in interleaved:
        order = _by_kind(shape.key_heads, (count[0] // shape.key_heads,) * 2)
        linears["gates"] = StackedLinear((gates,), (sum(count),), hidden, False, order, exact=True)
    return linears


def _by_kind(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Returns the order that puts rows of one kind next to each other. sizes: rows of each kind in one key head."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1).split_with_sizes(sizes, dim=1)
    return torch.cat([kind.flatten() for kind in rows])


def delta_vectors(shape: DeltaNetShape, prefix: str) -> dict[str, PlainWeight]:
    """Returns the small weights by field of DeltaNetWeights."""
    return {
        "conv": PlainWeight(f"{prefix}{MODULE}conv1d{WEIGHT}", (shape.channels, 1, shape.taps)),
        "decay": PlainWeight(f"{prefix}{MODULE}A_log", (shape.value_heads,)),
        "dt_bias": PlainWeight(f"{prefix}{MODULE}dt_bias", (shape.value_heads,)),
        "norm": PlainWeight(f"{prefix}{MODULE}norm{WEIGHT}", (shape.value_dim,)),
    }


def delta_weights(stored: Mapping[str, Tensor], dtype: torch.dtype) -> DeltaNetWeights:
    """Returns the small weights from those of delta_vectors, which were read in float32. dtype: that of the model."""
    make: Mapping[str, Callable[[Tensor], Tensor]] = {
        "conv": lambda kernels: kernels[:, 0].T.contiguous(), "decay": lambda log: -log.exp(),
        "dt_bias": lambda bias: bias, "norm": lambda norm: norm.to(dtype),
    }  # fmt: skip
    return DeltaNetWeights(**{field: change(stored[field]) for field, change in make.items()})

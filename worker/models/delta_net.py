"""The gated delta rule (Gated DeltaNet) of Qwen3.5 and Qwen3-Next. A sequence has a state of fixed size, and no K/V."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.kernels.cpu.recurrent import delta_net as in_c
from worker.kernels.linear import PackedLinear
from worker.kernels.recurrent.delta_net import DeltaNetShape, DeltaNetWeights
from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.checkpoint.stacked_linear import WEIGHT, StackedLinear
from worker.model.checkpoint.stored_weight import PlainWeight
from worker.model.layer_names import LayerNames
from worker.model.layer_parts import Place, SmallWeight, Step, StoredPart
from worker.model.mixers.kinds import Config, Mixer
from worker.model.mixers.recurrent import check_taps, decay, positive_sizes, taps_first
from worker.spec import LayerSpec, ModelSpec

MODULE = "linear_attn."
# Qwen3-Next stores all kinds of rows of the first key head, then all those of the second key head, and so on.
INTERLEAVED = f"{MODULE}in_proj_qkvz", f"{MODULE}in_proj_ba"
SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetLayer:
    """The weights of a Gated DeltaNet mixer. H: hidden size. Comments begin with the names in checkpoints."""

    kind: ClassVar[str] = "delta_net"
    qkv: PackedLinear  # in_proj_qkv, in_proj_z: H → queries, keys, values, output gates
    gates: PackedLinear  # in_proj_b, in_proj_a: H → b, a (inputs of beta and of the decay)
    o: PackedLinear  # out_proj: values → H
    small: DeltaNetWeights  # conv1d, A_log, dt_bias, norm

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from (self.qkv, self.gates, self.o)


def forward(h: Tensor, own: DeltaNetLayer, index: int, step: Step, next_weights: Sequence[Tensor]) -> Tensor:
    do, spec, slots = step.do, step.spec, step.inputs.state_slots
    projected, gates = do.linear(h, own.qkv), do.linear(h, own.gates)
    shape, state = spec.layers[index].state, step.cache.states[index]
    return do.delta_net(projected, gates, own.small, shape, state, slots, spec.norm_eps)


def _state(config: Config) -> DeltaNetShape:
    # Each key head is shared by the same number of value heads.
    sizes = positive_sizes(config, SIZES, lambda sizes: sizes[1] % sizes[0] == 0)
    if config["hidden_act"] not in ("silu", "swish"):
        name = config["hidden_act"]
        raise UnsupportedModel(f"activation {name!r} is not supported in recurrent layers; supported is silu")
    return DeltaNetShape(*sizes)


def shape_of(layer: LayerSpec) -> DeltaNetShape:
    assert isinstance(layer.state, DeltaNetShape)
    return layer.state


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    shape, hidden = shape_of(layer), spec.hidden_size
    rows, count = (shape.channels, shape.values), (shape.value_heads, shape.value_heads)
    linears = {
        "qkv": StackedLinear((f"{MODULE}in_proj_qkv", f"{MODULE}in_proj_z"), rows, hidden, False),
        "gates": StackedLinear((f"{MODULE}in_proj_b", f"{MODULE}in_proj_a"), count, hidden, False, exact=True),
        "o": StackedLinear((f"{MODULE}out_proj",), (hidden,), shape.values, False),
    }
    inputs, gates = INTERLEAVED
    if inputs in names.modules:
        values = shape.values // shape.key_heads
        order = _by_kind(shape.key_heads, (shape.key_dim, shape.key_dim, values, values))
        linears["qkv"] = StackedLinear((inputs,), (sum(rows),), hidden, False, order)
    if gates in names.modules:
        order = _by_kind(shape.key_heads, (count[0] // shape.key_heads,) * 2)
        linears["gates"] = StackedLinear((gates,), (sum(count),), hidden, False, order, exact=True)
    return linears


def _by_kind(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Returns the row order in which the rows of one kind are consecutive. sizes: rows of each kind in one key head"""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1).split_with_sizes(sizes, dim=1)
    return torch.cat([kind.flatten() for kind in rows])


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    shape = shape_of(layer)
    stored = {
        "conv": PlainWeight(f"{prefix}{MODULE}conv1d{WEIGHT}", (shape.channels, 1, shape.taps)),
        "decay": PlainWeight(f"{prefix}{MODULE}A_log", (shape.value_heads,)),
        "dt_bias": PlainWeight(f"{prefix}{MODULE}dt_bias", (shape.value_heads,)),
        "norm": PlainWeight(f"{prefix}{MODULE}norm{WEIGHT}", (shape.value_dim,)),
    }
    return {field: SmallWeight([weight], exact=True) for field, weight in stored.items()}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> DeltaNetLayer:
    conv, log, dt_bias, norm = (small[field][0] for field in ("conv", "decay", "dt_bias", "norm"))
    return DeltaNetLayer(**packed, small=DeltaNetWeights(taps_first(conv), decay(log), dt_bias, norm.to(like.dtype)))


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    check_taps(shape_of(layer).taps, "the convolution's kernel size (linear_conv_kernel_dim, mamba_d_conv)")


def _in_c(own: DeltaNetLayer, place: Place) -> dict[str, Any]:
    state = place.cache.states[place.index]
    recurrent = in_c.layer_in_c(own.small, shape_of(place.layer), state, place.spec.norm_eps)
    return {"qkv": own.qkv.cpu, "gates": own.gates.cpu, "o": own.o.cpu, "recurrent": recurrent}


MIXER = Mixer(
    state=_state,
    check=_check,
    stored=StoredPart(weights=DeltaNetLayer, linears=_linears, small=_small, make=_make),
    forward=forward,
    runs_in_c=lambda place: in_c.supports(place.dtype, shape_of(place.layer)),
    in_c=_in_c,
)

"""The gated delta rule (Gated DeltaNet) of Qwen3.5 and Qwen3-Next. A sequence has a state of fixed size, and no K/V."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import WEIGHT, PlainWeight, StackedLinear
from worker.models.family import Config
from worker.models.layer_kinds import LayerContext, LayerNames, Mixer, Place, SmallWeight, StoredPart
from worker.ops.linear.packed import PackedLinear
from worker.ops.native import MAX_TAPS
from worker.ops.recurrent import native as in_c
from worker.ops.recurrent.reference import DeltaNetWeights
from worker.ops.recurrent_state import DeltaNetShape
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


def forward(h: Tensor, own: DeltaNetLayer, index: int, step: LayerContext, next_weights: Sequence[Tensor]) -> Tensor:
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
    return DeltaNetLayer(**packed, small=DeltaNetWeights(conv_weight(conv), decay(log), dt_bias, norm.to(like.dtype)))


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    check_kernel_size(shape_of(layer).taps, "the convolution's kernel size (linear_conv_kernel_dim, mamba_d_conv)")


def _in_c(own: DeltaNetLayer, place: Place) -> dict[str, Any]:
    state = place.cache.states[place.index]
    recurrent = in_c.delta_net_in_c(own.small, shape_of(place.layer), state, place.spec.norm_eps)
    return {"qkv": own.qkv.cpu, "gates": own.gates.cpu, "o": own.o.cpu, "recurrent": recurrent}


MIXER = Mixer(
    state=_state,
    check=_check,
    stored=StoredPart(weights=DeltaNetLayer, linears=_linears, small=_small, make=_make),
    forward=forward,
    runs_in_c=lambda place: in_c.supports_delta_net(place.dtype, shape_of(place.layer)),
    in_c=_in_c,
)


# Helpers of the mixers with a recurrent state: they check sizes, and make small weights.


def positive_sizes(config: Config, names: Sequence[str], possible: Callable[[list[int]], bool]) -> list[int]:
    """Returns the settings `names`. Raises UnsupportedModel unless all are positive and possible(sizes) is true."""
    sizes = [int(config[name]) for name in names]
    if min(sizes) < 1 or not possible(sizes):
        sizes_text = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        raise UnsupportedModel(f"the config's sizes of recurrent layers are impossible: {sizes_text}")
    return sizes


def check_kernel_size(taps: int, name: str) -> None:
    """Raises UnsupportedModel if a convolution has more taps than the kernels support. name: the name of the setting"""
    if not 1 <= taps <= MAX_TAPS:
        raise UnsupportedModel(f"{name} {taps} is not supported; supported are numbers from 1 to {MAX_TAPS}")


def conv_weight(kernels: Tensor) -> Tensor:
    """Returns the weights of a convolution as [taps, channels]. kernels: the checkpoint's tensor [channels, 1, taps]"""
    return kernels[:, 0].T.contiguous()


def decay(log: Tensor) -> Tensor:
    return -log.exp()

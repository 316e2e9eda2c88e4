"""The Mamba-2 mixer of Granite 4. A sequence has a state of fixed size, and no K/V."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import BIAS, WEIGHT, PlainWeight, StackedLinear
from worker.models.config_values import shown
from worker.models.delta_net import check_kernel_size, conv_weight, decay, positive_sizes
from worker.models.family import Config
from worker.models.layer_kinds import LayerContext, LayerNames, Mixer, Place, SmallWeight, StoredPart
from worker.ops.linear.packed import PackedLinear
from worker.ops.recurrent import native as in_c
from worker.ops.recurrent.reference import Mamba2Weights
from worker.ops.recurrent_state import Mamba2Shape
from worker.spec import LayerSpec, ModelSpec

MODULE = "mamba."
SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
SERVED: Mapping[str, tuple[Any, ...]] = {  # for settings that are only partly supported: the supported values
    "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "hidden_act": ("silu", "swish"),
    "time_step_limit": (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Layer:
    """The weights of a Mamba-2 mixer. H: hidden size. Comments begin with the names in Hugging Face checkpoints."""

    kind: ClassVar[str] = "mamba2"
    qkv: PackedLinear  # in_proj: H → output gates, x, b, c
    gates: PackedLinear  # in_proj: H → dt
    o: PackedLinear  # out_proj: values → H
    small: Mamba2Weights  # conv1d, A_log, dt_bias, D, norm

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from (self.qkv, self.gates, self.o)


def forward(h: Tensor, own: Mamba2Layer, index: int, step: LayerContext, next_weights: Sequence[Tensor]) -> Tensor:
    do, spec, slots = step.do, step.spec, step.inputs.state_slots
    projected, gates = do.linear(h, own.qkv), do.linear(h, own.gates)
    shape, state = spec.layers[index].state, step.cache.states[index]
    return do.mamba2(projected, gates, own.small, shape, state, slots, spec.norm_eps)


def _state(config: Config) -> Mamba2Shape:
    expand = config["mamba_expand"]  # null: any width
    width = expand and expand * config["hidden_size"]
    sizes = positive_sizes(
        config, SIZES, lambda sizes: sizes[0] % sizes[2] == 0 and width in (None, sizes[0] * sizes[1])
    )
    for name, served in SERVED.items():
        if name == "hidden_act" and "mamba_hidden_act" in config:
            continue
        if config[name] not in served:
            raise UnsupportedModel(f"{name} {shown(config[name])} is not supported; supported is {served[0]!r}")
    return Mamba2Shape(*sizes)


def shape_of(layer: LayerSpec) -> Mamba2Shape:
    assert isinstance(layer.state, Mamba2Shape)
    return layer.state


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    shape, hidden = shape_of(layer), spec.hidden_size
    rows = sum(shape.projected) + shape.heads
    return {
        "qkv": StackedLinear((f"{MODULE}in_proj",), (rows,), hidden, False, apart=shape.heads),
        "o": StackedLinear((f"{MODULE}out_proj",), (hidden,), shape.values, False),
    }


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    shape = shape_of(layer)
    stored = {
        "conv": PlainWeight(f"{prefix}{MODULE}conv1d{WEIGHT}", (shape.channels, 1, shape.taps)),
        "conv_bias": PlainWeight(f"{prefix}{MODULE}conv1d{BIAS}", (shape.channels,)),
        "decay": PlainWeight(f"{prefix}{MODULE}A_log", (shape.heads,)),
        "dt_bias": PlainWeight(f"{prefix}{MODULE}dt_bias", (shape.heads,)),
        "skip": PlainWeight(f"{prefix}{MODULE}D", (shape.heads,)),
        "norm": PlainWeight(f"{prefix}{MODULE}norm{WEIGHT}", (shape.values,)),
    }
    return {field: SmallWeight([weight], exact=True) for field, weight in stored.items()}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> Mamba2Layer:
    read = {field: parts[0] for field, parts in small.items()}
    made = {"conv": conv_weight(read["conv"]), "decay": decay(read["decay"]), "norm": read["norm"].to(like.dtype)}
    return Mamba2Layer(**packed, small=Mamba2Weights(**(read | made)))


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    check_kernel_size(shape_of(layer).taps, "the convolution's kernel size (linear_conv_kernel_dim, mamba_d_conv)")


def _in_c(own: Mamba2Layer, place: Place) -> dict[str, Any]:
    state = place.cache.states[place.index]
    recurrent = in_c.mamba2_in_c(own.small, shape_of(place.layer), state, place.spec.norm_eps)
    return {"qkv": own.qkv.cpu, "gates": own.gates.cpu, "o": own.o.cpu, "recurrent": recurrent}


MIXER = Mixer(
    state=_state,
    check=_check,
    stored=StoredPart(weights=Mamba2Layer, linears=_linears, small=_small, make=_make),
    forward=forward,
    runs_in_c=lambda place: in_c.supports_mamba2(place.dtype, shape_of(place.layer)),
    in_c=_in_c,
)

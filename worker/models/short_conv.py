"""The short convolution of LFM2. A sequence's state is its last inputs of the convolution; there is no K/V."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import WEIGHT, PlainWeight, StackedLinear
from worker.models.delta_net import check_kernel_size, conv_weight
from worker.models.family import Config
from worker.models.layer_kinds import LayerContext, LayerNames, Mixer, Place, SmallWeight, StoredPart
from worker.ops.linear.packed import PackedLinear
from worker.ops.recurrent import native as in_c
from worker.ops.recurrent_state import ShortConvShape
from worker.spec import LayerSpec, ModelSpec

MODULE = "conv."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvLayer:
    """The weights of a short convolution. H: hidden size. Comments begin with the names in Hugging Face checkpoints."""

    kind: ClassVar[str] = "short_conv"
    qkv: PackedLinear  # in_proj: H → b, c, x
    o: PackedLinear  # out_proj: H → H
    conv: Tensor  # conv [taps, H] float32

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from (self.qkv, self.o)


def forward(h: Tensor, own: ShortConvLayer, index: int, step: LayerContext, next_weights: Sequence[Tensor]) -> Tensor:
    projected = step.do.linear(h, own.qkv)
    return step.do.short_conv(projected, own.conv, step.cache.states[index], step.inputs.state_slots)


def _state(config: Config) -> ShortConvShape:
    if config["conv_L_cache"] < 1:
        raise UnsupportedModel(f"conv_L_cache {config['conv_L_cache']!r} is not supported; it counts tokens from 1 on")
    return ShortConvShape(config["hidden_size"], config["conv_L_cache"])


def shape_of(layer: LayerSpec) -> ShortConvShape:
    assert isinstance(layer.state, ShortConvShape)
    return layer.state


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    channels, hidden = shape_of(layer).channels, spec.hidden_size
    return {
        "qkv": StackedLinear((f"{MODULE}in_proj",), (3 * channels,), hidden, False),
        "o": StackedLinear((f"{MODULE}out_proj",), (hidden,), channels, False),
    }


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    shape = shape_of(layer)
    stored = PlainWeight(f"{prefix}{MODULE}conv{WEIGHT}", (shape.channels, 1, shape.taps))
    return {"conv": SmallWeight([stored], exact=True)}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> ShortConvLayer:
    return ShortConvLayer(**packed, conv=conv_weight(small["conv"][0]))


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    check_kernel_size(shape_of(layer).taps, "conv_L_cache")


def _in_c(own: ShortConvLayer, place: Place) -> dict[str, Any]:
    recurrent = in_c.short_conv_in_c(own.conv, place.cache.states[place.index])
    return {"qkv": own.qkv.cpu, "o": own.o.cpu, "recurrent": recurrent}


MIXER = Mixer(
    state=_state,
    check=_check,
    stored=StoredPart(weights=ShortConvLayer, linears=_linears, small=_small, make=_make),
    forward=forward,
    runs_in_c=lambda place: in_c.supports_short_conv(place.dtype, shape_of(place.layer).taps),
    in_c=_in_c,
)

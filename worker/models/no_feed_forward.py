"""The feed-forward of a layer that has none, only a mixer (Nemotron-H). It adds zeros to the residual stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.stored_weight import StackedLinear
from worker.models.layer_kinds import FeedForward, LayerContext, LayerNames, SmallWeight, StoredPart
from worker.ops.linear.packed import PackedLinear
from worker.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWeights:
    """The weights of no network."""

    kind: ClassVar[str] = "none"

    @property
    def first(self) -> None:
        return None

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from ()


def forward(h: Tensor, x: Tensor, own: NoWeights, step: LayerContext) -> tuple[Tensor, PackedLinear | None]:
    """Returns zeros, so that the loop over the layers is the same for every layer. -0 in the sum becomes 0."""
    return torch.zeros_like(x), None


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    return {}


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    return {}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> NoWeights:
    return NoWeights()


def _in_c(own: NoWeights, spec: ModelSpec) -> dict[str, Any]:
    return {}


FEED_FORWARD = FeedForward(
    stored=StoredPart(weights=NoWeights, linears=_linears, small=_small, make=_make), forward=forward, in_c=_in_c
)

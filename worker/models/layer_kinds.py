"""The records through which the loader and the decoder see any kind of mixer or feed-forward network.

A part of a layer is its mixer or its feed-forward network.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kernels.experts import PackedExperts
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.kv_cache.tensors import KVCache
from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.model.checkpoint.stored_weight import PlainWeight
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.layer_names import LayerNames
from worker.spec import LayerSpec, ModelSpec

Linears = Iterator[PackedLinear | PackedExperts]


@dataclass(frozen=True, slots=True)
class SmallWeight:
    """A vector or another small tensor of a layer.

    parts: the checkpoint's tensors from which the small weight is made
    exact: if true, the parts are read as float32, whatever the dtype of the model is
    """

    parts: Sequence[PlainWeight]
    exact: bool = False


class Made(Protocol):
    """Makes the weights of a part of a layer.

    packed: the part's linears, by field
    small: the tensors of each small weight, by field
    like: a tensor with the model's dtype and device
    """

    def __call__(
        self, spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]],
        like: Tensor,
    ) -> Any: ...  # fmt: skip


def no_stacks(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, Sequence[StackedLinear]]:
    return {}


def nothing_unread(layer: LayerSpec) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """How a checkpoint stores a part of a layer, and how the part's weights are made from the stored tensors.

    weights: the type of the record that `make` returns
    linears: returns the linear layers, by their field in `weights`. Rows marked `apart` become the field `gates`.
    stacks: returns the linear layers of all experts, by field: one linear layer for each expert
    small: returns the small weights, by field. Its last argument is the prefix of the layer's tensor names.
    unread: returns modules that a checkpoint may hold although the part does not use them
    """

    weights: type
    linears: Callable[[ModelSpec, LayerSpec, LayerNames], dict[str, StackedLinear]]
    stacks: Callable[[ModelSpec, LayerSpec, LayerNames], dict[str, Sequence[StackedLinear]]] = no_stacks
    small: Callable[[ModelSpec, LayerSpec, LayerNames, str], dict[str, SmallWeight]]
    make: Made
    unread: Callable[[LayerSpec], tuple[str, ...]] = nothing_unread

    def spelled_linears(self, spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
        """Returns the linears, with modules named as in the checkpoint."""
        found = self.linears(spec, layer, names)
        return {
            field: replace(linear, modules=tuple(map(names.spelled, linear.modules))) for field, linear in found.items()
        }


@dataclass(frozen=True, slots=True)
class Step:
    """The values that all layers of one forward read."""

    do: Operations
    spec: ModelSpec
    ropes: Sequence[tuple[Tensor, Tensor]]  # cos and sin [positions, D] float32, for each rotary table of the spec
    query_scales: Tensor | None  # [positions] float32
    inputs: ForwardInputs
    cache: KVCache


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of a decoder with the values from which its record for the C library is made."""

    index: int
    spec: ModelSpec
    ropes: Sequence[tuple[Tensor, Tensor]]
    cache: KVCache
    dtype: torch.dtype  # the model's dtype

    @property
    def layer(self) -> LayerSpec:
        return self.spec.layers[self.index]

"""Defines the functions of a kind of feed-forward network, and finds a kind by name.

A kind is imported only when a model has layers of that kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from worker.kernels.linear import PackedLinear
from worker.model.family import Config, FamilyExperts
from worker.model.layer_parts import StoredPart
from worker.spec import ExpertsSpec, ModelSpec


def no_sizes(row: FamilyExperts, chosen: str, config: Config) -> None:
    return None


def nothing_to_count(own: Any, loads: Tensor) -> Any:
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The functions of a kind of feed-forward network.

    sizes: reads the sizes of experts from a config. Its arguments are the family's experts, the name of the setting
        for the number of experts per row, and the config. Returns None if the kind has no experts. Raises
        UnsupportedModel.
    stored: how a checkpoint stores the weights; their record has the properties of FeedForwardWeights
    forward: returns (output, None), or (input of the last linear, last linear). Its arguments are the normed rows
        [T, H], the residual stream [T, H], the weights and the Step.
    in_c: returns the fields of DecoderCLayer, from the weights
    counting: returns the weights with a counter [E] int64 of the rows that choose each expert, if there are experts
    """

    sizes: Callable[[FamilyExperts, str, Config], ExpertsSpec | None] = no_sizes
    stored: StoredPart
    forward: Callable[..., tuple[Tensor, PackedLinear | None]]
    in_c: Callable[[Any, ModelSpec], dict[str, Any]]
    counting: Callable[[Any, Tensor], Any] = nothing_to_count


FEED_FORWARDS: Mapping[str, str] = {  # kind → its module
    "dense": "worker.model.feed_forward.dense", "experts": "worker.model.feed_forward.experts",
}  # fmt: skip


def feed_forward(kind: str) -> FeedForward:
    """Returns the functions of a kind, which is one of FEED_FORWARDS."""
    found: FeedForward = import_module(FEED_FORWARDS[kind]).FEED_FORWARD
    return found

"""What a kind of feed-forward network is, and the kinds by name. Only the kinds of a model's layers are imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.kernels.linear import PackedLinear
from worker.model.family import Config, FamilyExperts
from worker.model.layer_parts import StoredPart
from worker.model.rooms import room
from worker.spec import ExpertsSpec, ModelSpec


def no_sizes(row: FamilyExperts, chosen: str, config: Config) -> None:
    return None


def nothing_to_count(own: Any, loads: Tensor) -> Any:
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The functions of a kind of feed-forward network.

    sizes: reads the sizes of experts from a config, by the row of its family and the name of the setting that has how
        many experts a row has; None if the kind has none. Raises UnsupportedModel.
    stored: what a checkpoint holds. The record of the weights has `kind`, `first`, the linear that is read first (None
        if a step chooses it), and `linears`, all its linears.
    forward: returns the output, or the input of its last linear and this linear, from the normed rows [T, H], the
        residual stream [T, H], the weights and the Step.
    in_c: returns the fields of DecoderCLayer from the weights.
    counting: returns the weights with a counter [E] int64 of how many rows choose each expert, if rows choose any.
    """

    sizes: Callable[[FamilyExperts, str, Config], ExpertsSpec | None] = no_sizes
    stored: StoredPart
    forward: Callable[..., tuple[Tensor, PackedLinear | None]]
    in_c: Callable[[Any, ModelSpec], dict[str, Any]]
    counting: Callable[[Any, Tensor], Any] = nothing_to_count


KINDS = {"dense": "layers with an MLP", "experts": "mixtures of experts"}  # kind → its layers in a message


def feed_forward(kind: str) -> FeedForward:
    """Returns the functions of a kind. Raises UnsupportedModel if this installation lacks its module."""
    found: FeedForward = room(f"feed_forward.{kind}", KINDS[kind]).FEED_FORWARD
    return found

"""What a kind of mixer is, and the kinds by name. Only the kinds of a model's layers are imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.kernels.recurrent.recurrent_state import RecurrentShape
from worker.model.layer_parts import Place, StoredPart
from worker.model.rooms import room
from worker.spec import LayerSpec, ModelSpec

Config = Mapping[str, Any]


def no_state(config: Config) -> None:
    """The cache keeps keys and values, whose shape is ModelSpec.kv_shape."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The functions of a kind of mixer.

    state: reads from a config what the cache must keep of a sequence in such a layer; None if that is K/V. Raises
        UnsupportedModel.
    check: raises UnsupportedModel if the kernels do not hold the sizes.
    stored: what a checkpoint holds. The record of the weights has `kind`, `o`, the linear behind the mixer, and
        `linears`, all its linears.
    forward: returns the mixed rows, which `o` reads, and writes K/V or states, from the normed rows [T, H], the
        weights, the number of the layer, the Step, and the memory of the weights that are read next.
    runs_in_c: whether the C library computes it.
    in_c: returns the fields of DecoderCLayer from the weights.
    """

    state: Callable[[Config], RecurrentShape | None] = no_state
    check: Callable[[ModelSpec, LayerSpec], None]
    stored: StoredPart
    forward: Callable[..., Tensor]
    runs_in_c: Callable[[Place], bool]
    in_c: Callable[[Any, Place], dict[str, Any]]


KINDS = {  # kind → its layers in a message
    "attention": "layers with attention",
    "delta_net": "layers with the gated delta rule",
    "mamba2": "Mamba-2 layers",
    "short_conv": "layers with short convolutions",
}


def mixer(kind: str) -> Mixer:
    """Returns the functions of a kind. Raises UnsupportedModel if this installation lacks its module."""
    found: Mixer = room(f"mixers.{kind}", KINDS[kind]).MIXER
    return found

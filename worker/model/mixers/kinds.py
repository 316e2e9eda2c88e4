"""Defines the functions of a kind of mixer, and finds a kind by name.

A kind is imported only when a model has layers of that kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from worker.kernels.recurrent.recurrent_state import RecurrentShape
from worker.model.family import Config
from worker.model.layer_parts import Place, StoredPart
from worker.spec import LayerSpec, ModelSpec


def no_state(config: Config) -> None:
    """Returns None, because the kind has K/V and no recurrent state. ModelSpec.kv_shape has the shape of K/V."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The functions of a kind of mixer.

    state: reads from a config the shape of a sequence's recurrent state in a layer of this kind; None: the kind has
        K/V instead. Raises UnsupportedModel.
    check: raises UnsupportedModel if sizes are too large for the kernels, or contradict each other
    stored: how a checkpoint stores the weights; their record has the properties of MixerWeights
    forward: writes K/V or states, and returns the mixed rows, which are the input of the linear `o`. Its arguments are
        the normed rows [T, H], the weights, the layer's index, the Step, and the tensors of the weights that are read
        next, which may be prefetched.
    runs_in_c: returns whether the C library can compute a layer
    in_c: returns the fields of DecoderCLayer, from the weights and the place of the layer
    """

    state: Callable[[Config], RecurrentShape | None] = no_state
    check: Callable[[ModelSpec, LayerSpec], None]
    stored: StoredPart
    forward: Callable[..., Tensor]
    runs_in_c: Callable[[Place], bool]
    in_c: Callable[[Any, Place], dict[str, Any]]


MIXERS: Mapping[str, str] = {  # kind → its module
    "attention": "worker.model.mixers.attention", "delta_net": "worker.model.mixers.delta_net",
    "mamba2": "worker.model.mixers.mamba2", "short_conv": "worker.model.mixers.short_conv",
}  # fmt: skip


def mixer(kind: str) -> Mixer:
    """Returns the functions of a kind, which is one of MIXERS."""
    found: Mixer = import_module(MIXERS[kind]).MIXER
    return found

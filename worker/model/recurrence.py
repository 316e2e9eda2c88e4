"""The kinds of recurrent layers that families have, and their sizes by a config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.kernels.delta_net import DeltaNetShape
from worker.kernels.short_conv import ShortConvShape
from worker.model.checkpoint import UnsupportedModel

Config = Mapping[str, Any]
LINEAR, CONV = "linear_attention", "conv"  # types of layers
DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A kind of recurrent layer: the type of such layers in a config, and a function that gives their sizes."""

    layer_type: str
    shape: Callable[[Config], DeltaNetShape | ShortConvShape]


def _delta_rule(config: Config) -> DeltaNetShape:
    sizes = [int(config[name]) for name in DELTA_SIZES]
    key_heads, value_heads = sizes[:2]
    if min(sizes) < 1 or value_heads % key_heads:
        shown = ", ".join(f"{name} {size}" for name, size in zip(DELTA_SIZES, sizes, strict=True))
        raise UnsupportedModel(f"the config's sizes of recurrent layers are impossible: {shown}")
    if config["hidden_act"] not in ("silu", "swish"):
        name = config["hidden_act"]
        raise UnsupportedModel(f"activation {name!r} is not supported in recurrent layers; supported is silu")
    return DeltaNetShape(*sizes)


def _short_conv(config: Config) -> ShortConvShape:
    if config["conv_L_cache"] < 1:
        raise UnsupportedModel(f"conv_L_cache {config['conv_L_cache']!r} is not supported; it counts tokens from 1 on")
    return ShortConvShape(config["hidden_size"], config["conv_L_cache"])


DELTA_RULE = Recurrence(LINEAR, _delta_rule)
SHORT_CONV = Recurrence(CONV, _short_conv)

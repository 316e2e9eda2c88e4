"""The kinds of recurrent layers that families have, and their sizes by a config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.kernels.delta_net import DeltaNetShape
from worker.kernels.mamba2 import Mamba2Shape
from worker.kernels.short_conv import ShortConvShape
from worker.model.checkpoint import UnsupportedModel
from worker.model.spec import RecurrentShape

Config = Mapping[str, Any]
LINEAR, CONV = "linear_attention", "conv"  # types of layers
DELTA_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
MAMBA_SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
MAMBA_SERVED: Mapping[str, tuple[Any, ...]] = {  # settings of which only some values are supported
    "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "hidden_act": ("silu", "swish"),
    "time_step_limit": (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A kind of recurrent layer: the type of such layers in a config, and a function that gives their sizes."""

    layer_type: str
    shape: Callable[[Config], RecurrentShape]


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


def _mamba2(config: Config) -> Mamba2Shape:
    sizes = [int(config[name]) for name in MAMBA_SIZES]
    heads, head_dim, groups, *_ = sizes
    if min(sizes) < 1 or heads % groups or heads * head_dim != config["mamba_expand"] * config["hidden_size"]:
        shown = ", ".join(f"{name} {size}" for name, size in zip(MAMBA_SIZES, sizes, strict=True))
        raise UnsupportedModel(f"the config's sizes of recurrent layers are impossible: {shown}")
    for name, served in MAMBA_SERVED.items():
        if config[name] not in served:
            raise UnsupportedModel(f"{name} {config[name]!r} is not supported; supported is {served[0]!r}")
    return Mamba2Shape(*sizes)


DELTA_RULE = Recurrence(LINEAR, _delta_rule)
SHORT_CONV = Recurrence(CONV, _short_conv)
MAMBA2 = Recurrence(LINEAR, _mamba2)

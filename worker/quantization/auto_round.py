"""Reads checkpoints with `quant_method: auto-round`, whose tensors have the layouts of other libraries.

`packing_format` names the layout: that of GPTQ, with zero points stored minus one or as they are, of AWQ, or of
compressed-tensors. `extra_config` has settings of single layers, by their names or by regular expressions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import WEIGHT, Shape, StoredTensors, StoredWeight
from worker.quantization.awq import check_pattern
from worker.quantization.awq import read as read_awq
from worker.quantization.compressed_tensors import FLOATS, CompressedTensors, FloatGroup
from worker.quantization.fp8 import read as read_fp8
from worker.quantization.gptq import read as read_gptq
from worker.spec import StoredQuantization

METHOD = "auto-round"
NAME = re.compile(r"[\w.-]+")  # an entry with other characters is a regular expression
PLAIN_BITS = 16  # layers with as many bits are not quantized
Config = Mapping[str, Any]


class Layers(Protocol):
    """How some layers of a checkpoint are stored, as Method of methods.py."""

    @property
    def ignored(self) -> tuple[str, ...]: ...

    @property
    def stored(self) -> StoredQuantization: ...

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None: ...


def _gptq(checkpoint_format: str) -> Callable[[Config], Layers]:
    return lambda settings: read_gptq(_only(settings, "bits", "group_size") | {"checkpoint_format": checkpoint_format})


def _awq(settings: Config) -> Layers:
    return read_awq(_only(settings, "bits", "group_size") | {"zero_point": True})


def _only(settings: Config, *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


# packing_format without the prefix "auto_round:" → reads the settings of integers
INTEGERS: Mapping[str, Callable[[Config], Layers]] = {
    "auto_gptq": _gptq("gptq"), "auto_round": _gptq("gptq_v2"), "gptqmodel": _gptq("gptq_v2"), "auto_awq": _awq,
}  # fmt: skip
# beginning of data_type, and bits → the format of compressed-tensors with the same tensors
FLOAT_FORMATS = {
    ("nv_fp", 4): "nvfp4-pack-quantized", ("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AutoRound:
    """The settings of an AutoRound checkpoint. A linear is quantized if the checkpoint has its codes.

    default: the settings of most layers; named, patterns: those of layers by name, and by a part of their name
    """

    default: Layers
    named: Mapping[str, Layers | None]
    patterns: tuple[tuple[str, Layers | None], ...]

    @property
    def _all(self) -> list[Layers]:
        others = [*self.named.values(), *(layers for _, layers in self.patterns)]
        return [self.default, *(layers for layers in others if layers is not None)]

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(ending for layers in self._all for ending in layers.ignored))

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization.of_all(list(dict.fromkeys(layers.stored for layers in self._all)))

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None:
        module = name.removesuffix(WEIGHT)
        if module in self.named:
            layers = self.named[module]
        else:
            layers = next((own for pattern, own in self.patterns if re.search(pattern, module)), self.default)
        return None if layers is None else layers.weight(name, shape, tensors)


def read(settings: Config) -> AutoRound:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    extra = {name: _layers({**settings, **own}) for name, own in (settings.get("extra_config") or {}).items()}
    patterns = {name for name in extra if not NAME.fullmatch(name)}
    return AutoRound(
        _layers(settings) or _unsupported(settings),
        {name: layers for name, layers in extra.items() if name not in patterns},
        tuple((check_pattern(name, METHOD), layers) for name, layers in extra.items() if name in patterns),
    )


def _layers(settings: Config) -> Layers | None:
    """Returns how layers with these settings are stored; None if they are not quantized."""
    type, bits = str(settings.get("data_type") or "int"), settings.get("bits")
    if isinstance(bits, int) and bits >= PLAIN_BITS:
        return None
    if settings.get("rotation_config"):
        raise CheckpointError(f"quant_method {METHOD!r}: rotation_config is not supported")
    packing = str(settings.get("packing_format") or "auto_round:auto_gptq")
    reader = INTEGERS.get(packing.removeprefix("auto_round:"))
    if type.startswith("int") and reader is not None:
        return reader(settings)
    form = next((form for (begin, of), form in FLOAT_FORMATS.items() if type.startswith(begin) and of == bits), None)
    if form is not None:
        return CompressedTensors((FloatGroup((), *FLOATS[form], "other"),))
    if type.startswith("fp8") and bits == 8:
        size = settings.get("group_size")
        return read_fp8({"activation_scheme": "static", "weight_block_size": size if isinstance(size, list) else None})
    return _unsupported(settings)


def _unsupported(settings: Config) -> Layers:
    names = ", ".join(f"{name} {settings.get(name)!r}" for name in ("packing_format", "data_type", "bits"))
    raise CheckpointError(
        f"quant_method {METHOD!r}: weights with {names} are not supported; supported are int with packing_format "
        f"auto_round:{', auto_round:'.join(INTEGERS)}, and data_type nv_fp4, mx_fp4, mx_fp8 and fp8"
    )

"""Reads checkpoints with `quant_method: gptq`: unsigned codes of 4 or 8 bits, packed along the inputs, and zero points.

A weight [N, K] is stored as qweight [K / p, N], qzeros [groups, N / p] and scales [groups, N]; an int32 has p codes.
g_idx [K] is the group of each input. It is not ascending if the inputs were reordered for quantization (`desc_act`).
Zero points are stored minus one, except in `checkpoint_format: gptq_v2`. The number 1 was subtracted from all codes of
an int32 by a single subtraction, so a zero point of 0 has borrowed from its neighbour.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors, check_finite
from worker.ops.quantized_weight import QuantizedWeight
from worker.quantization.awq import CODE_MAPS, check_group_size, check_pattern, input_order, signed, unpack
from worker.spec import StoredQuantization

METHOD = "gptq"
ONES = {4: 0x11111111, 8: 0x01010101}  # bits of a code → an int32 in which every code is 1
VERSIONS = {"gptq": True, "gptq_v2": False}  # checkpoint_format → whether zero points are stored minus one
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gptq:
    """The settings of a GPTQ checkpoint or of some of its modules. A linear is quantized if it has a qweight.

    group_size: how many inputs share a scale; 0: all
    less_one: if true, zero points are stored minus one
    ordered: if true, the inputs were reordered for quantization
    dynamic: patterns of module names, each with the settings of the modules that match it
    """

    bits: int
    group_size: int
    less_one: bool
    ordered: bool
    dynamic: tuple[tuple[str, "Gptq"], ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def stored(self) -> StoredQuantization:
        own = StoredQuantization(f"int{self.bits}", f"{self.group_size} values" if self.group_size else "a row")
        return StoredQuantization.of_all([own, *(settings.stored for _, settings in self.dynamic)])

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> "GptqWeight | None":
        module = name.removesuffix("weight")
        if module + "qweight" not in tensors:
            return None
        found = (settings for pattern, settings in self.dynamic if re.match(pattern, module.removesuffix(".")))
        settings = next(found, replace(self, dynamic=()))
        return GptqWeight(name, shape, tensors, settings, settings.ordered or module + "g_idx" in tensors)


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """A quantized weight [N, K] of a GPTQ checkpoint."""

    name: str
    shape: Shape
    checkpoint: StoredTensors
    settings: Gptq
    has_g_idx: bool

    @property
    def layout(self) -> Layout:
        return Layout(CODE_MAPS[self.settings.bits], self.settings.group_size, minimum=True)

    @property
    def group_size(self) -> int:
        return self.settings.group_size or self.shape[1]

    def tensors(self) -> list[ExpectedTensor]:
        (n, k), bits, module = self.shape, self.settings.bits, self.name.removesuffix("weight")
        groups = -(-k // self.group_size)
        found = [
            ExpectedTensor(module + "qweight", (-(-k * bits // 32), n), ("I32",)),
            ExpectedTensor(module + "qzeros", (groups, -(-n * bits // 32)), ("I32",)),
            ExpectedTensor(module + "scales", (groups, n)),
        ]
        return [*found, ExpectedTensor(module + "g_idx", (k,), ("I32",))] if self.has_g_idx else found

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        (n, k), bits = self.shape, self.settings.bits
        qweight, qzeros, scales, *rest = self.tensors()
        codes = unpack(read(qweight.name, qweight.shape, torch.int32).T, bits)[:, :k]
        zeros = read(qzeros.name, qzeros.shape, torch.int32) + (ONES[bits] if self.settings.less_one else 0)
        scale = check_finite(read(scales.name, scales.shape, torch.float32), scales.name, self.checkpoint)
        order = self._order(read(rest[0].name, rest[0].shape, torch.int32), rest[0].name) if rest else None
        return signed(codes, bits, scale.T.contiguous(), unpack(zeros, bits)[:, :n].T, self.group_size, order)

    def _order(self, g_idx: Tensor, name: str) -> Tensor | None:
        """Returns the indices of the inputs, sorted by group; None if they are sorted already.

        Some old tools wrote a g_idx of zeros although the inputs are sorted.
        """
        if not self.settings.ordered and not bool(g_idx.any()):
            return None
        return input_order(g_idx, self.group_size, name, self.checkpoint)


def read(settings: Config) -> Gptq:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    own = _read(settings)
    if rotation := settings.get("rotation") or (settings.get("meta") or {}).get("rotation"):
        raise CheckpointError(f"quant_method {METHOD!r}: rotation {rotation!r} is not supported")
    dynamic = settings.get("dynamic") or {}
    changed = {pattern: more for pattern, more in dynamic.items() if not pattern.startswith("-:")}
    return replace(
        own,
        dynamic=tuple(
            (check_pattern(pattern.removeprefix("+:"), METHOD), _read({**settings, **(more or {})}))
            for pattern, more in changed.items()
        ),
    )


def _read(settings: Config) -> Gptq:
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if version not in VERSIONS:
        raise CheckpointError(
            f"quant_method {METHOD!r}: checkpoint_format {version!r} is not supported; supported are "
            f"{', '.join(VERSIONS)}"
        )
    if settings.get("bits") not in CODE_MAPS:
        raise CheckpointError(
            f"quant_method {METHOD!r}: weights of {settings.get('bits')} bits are not supported; supported are "
            f"{', '.join(map(str, CODE_MAPS))} bits"
        )
    size = check_group_size(settings.get("group_size", -1), METHOD)
    return Gptq(settings["bits"], size, VERSIONS[version], bool(settings.get("desc_act")))

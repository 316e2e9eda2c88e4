"""Packs the weights of many experts, of four or eight bits, for GPU kernels, as one PackedCodes with the rows of all
experts.

The rows of each expert are padded to whole tiles, so that expert e begins at row e * padded_rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.ops.linear.native import Coded
from worker.ops.linear.packed_codes import PackedCodes, pack_with_wide_scales, unpack_codes, with_narrow_scales
from worker.ops.quantized_weight import QuantizedWeight, stack


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """The weights [N, K] of one linear of `count` experts."""

    packed: PackedCodes  # [count * padded_rows, K]
    count: int
    rows: int  # N

    @property
    def padded_rows(self) -> int:
        """How many rows an expert has, padded to whole tiles."""
        return self.packed.padded_rows // self.count

    def expert(self, number: int) -> PackedCodes:
        """Returns the weight [N, K] of one expert, without a copy."""
        packed, tiles = self.packed, len(self.packed.codes) // self.count
        rows = slice(number * self.padded_rows, (number + 1) * self.padded_rows)
        return replace(
            packed,
            shape=(self.rows, packed.shape[1]),
            codes=packed.codes[number * tiles : (number + 1) * tiles],
            scale=packed.scale[:, rows],
            minimum=None if packed.minimum is None else packed.minimum[:, rows],
        )


def pack_experts_on_gpu(
    experts: Iterable[Sequence[Tensor | Coded]], count: int, dtype: torch.dtype
) -> tuple[Tensor, ExpertCodes | None]:
    """Packs one linear of `count` experts on their device. The parts of an expert's weight are stacked.

    If all experts are quantized in the same format and have no input order, returns an empty tensor and the codes.
    Otherwise, returns the weights [count, N, K] in `dtype`, and None. Experts are read from the iterable one by one,
    so that only one expert is in memory twice.
    """
    codes: ExpertCodes | None = None
    plain: Tensor | None = None
    for number, parts in enumerate(experts):
        one = None if plain is not None else _one_weight(parts)
        wide = None if one is None else pack_with_wide_scales(one)
        if wide is not None and codes is None and number == 0:
            codes = _empty(wide, count)
        if wide is not None and codes is not None and _fits(wide, codes):
            _put(wide, codes, number)
            continue
        full = torch.cat([part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts])
        if plain is None:
            plain = full.new_empty(count, *full.shape)
            for before in range(number):
                assert codes is not None
                plain[before] = unpack_codes(codes.expert(before)).dequantize(dtype)
            codes = None
        plain[number] = full
    if plain is not None:
        return plain, None
    assert codes is not None
    packed = with_narrow_scales(codes.packed)
    return torch.empty(0, dtype=dtype, device=packed.codes.device), replace(codes, packed=packed)


def _one_weight(parts: Sequence[Tensor | Coded]) -> QuantizedWeight | None:
    """Returns the parts as one weight; None if they have several formats or an input order."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts) or len(stacked := stack(quantized)) > 1 or stacked[0].input_order is not None:
        return None
    return stacked[0]


def _empty(first: PackedCodes, count: int) -> ExpertCodes:
    """Allocates memory for `count` weights of the same shape and format as the first one."""

    def wide(scale: Tensor) -> Tensor:
        return scale.new_empty(len(scale), count * scale.shape[1])

    packed = replace(
        first,
        shape=(count * first.padded_rows, first.shape[1]),
        codes=first.codes.new_empty(count * len(first.codes), *first.codes.shape[1:]),
        scale=wide(first.scale),
        minimum=None if first.minimum is None else wide(first.minimum),
    )
    return ExpertCodes(packed, count, first.shape[0])


def _fits(one: PackedCodes, codes: ExpertCodes) -> bool:
    place = codes.expert(0)
    return (one.shape, one.format) == (place.shape, place.format)


def _put(one: PackedCodes, codes: ExpertCodes, number: int) -> None:
    place = codes.expert(number)
    place.codes.copy_(one.codes)
    place.scale.copy_(one.scale)
    if place.minimum is not None and one.minimum is not None:
        place.minimum.copy_(one.minimum)

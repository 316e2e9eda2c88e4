"""Packs weights of four or eight bits for GPU kernels: the codes are in the order in which programs load them.

A program multiplies ROWS rows of the weight, and advances along K by STEP inputs. The codes of ROWS rows and STEP
inputs are consecutive in memory, followed by the codes of the next STEP inputs of the same rows. So a program reads one
stream of bytes.

A word of 16 bits has the codes of 16 / bits inputs that are `part_inputs` apart: the lowest bits of a row's words are
the codes of the first `part_inputs` inputs, the next bits are the codes of the next `part_inputs` inputs, and so on. So
one shift and one mask of all words give the codes of consecutive inputs, which share a scale, and K keeps its order.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.quantized_weight import E4M3, ROWS_AT_ONCE, CodeMap, QuantizedWeight

ROWS, STEP = 64, 128
WHOLE_ROW = 0  # the group size that stands for one scale per row


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A QuantizedWeight [N, K] on a GPU. Rows are padded to a multiple of ROWS, inputs to a multiple of STEP.

    Scales of 16 bits are stored in words of 32 bits, because a GPU cannot copy smaller pieces asynchronously. The lower
    half of a word is the scale of a group. The upper half is the group's minimum. Without minimums, the upper half is
    the scale of the next group, so that there is one word for two groups; or, if groups have at least STEP inputs, the
    upper half is the same scale as the lower half.
    """

    shape: tuple[int, int]
    codes: Tensor  # [N / ROWS, K / STEP, STEP * bits / 16 / part_inputs, ROWS, part_inputs] int16
    scale: Tensor  # [groups, N] float32, or int32 words (see above)
    minimum: Tensor | None  # [groups, N] float32; None if there are no minimums, or if they are in the words of `scale`
    table: Tensor  # the values of the code map, float32
    code_map: CodeMap
    group_size: int  # how many inputs share a scale: a divisor or a multiple of STEP, or WHOLE_ROW
    narrow: torch.dtype | None  # the 16-bit format of scales and minimums; None: they are float32
    has_minimum: bool
    input_order: Tensor | None  # as in QuantizedWeight

    @property
    def format(self) -> tuple[object, ...]:
        """The constants for which a kernel must be compiled."""
        return self.code_map.name, self.group_size, self.narrow, self.has_minimum

    @property
    def pairs(self) -> bool:
        """True if a word of `scale` has the scales of two groups."""
        return self.narrow is not None and not self.has_minimum and 0 < self.group_size < STEP

    @property
    def part_inputs(self) -> int:
        return self.codes.shape[-1]

    @property
    def padded_rows(self) -> int:
        return self.codes.shape[0] * ROWS

    def scale_bytes_in_step(self) -> int:
        """Returns how many bytes the scales and minimums for STEP inputs of one row take."""
        groups = STEP // self.group_size if 0 < self.group_size < STEP else 1
        words = groups // 2 if self.pairs else groups
        return 8 * words if self.has_minimum and self.narrow is None else 4 * words

    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.minimum, self.table) if part is not None)


def pack_codes(weight: QuantizedWeight) -> PackedCodes:
    """Packs the weight on its device.

    Scales and minimums become 16-bit numbers if bfloat16 or float16 represents all of them exactly, for example because
    the checkpoint has 16-bit scales. Otherwise, they stay float32. NaNs of e4m3 become zeros, as in E4M3's code map.
    """
    return with_narrow_scales(pack_with_wide_scales(weight))


def pack_with_wide_scales(weight: QuantizedWeight) -> PackedCodes:
    """Packs the weight with scales and minimums in float32."""
    group_size = _group_size(weight)
    scale, minimum = (
        None if part is None else _by_group(part, weight, group_size) for part in (weight.scale, weight.minimum)
    )
    assert scale is not None
    return PackedCodes(
        weight.shape,
        _words(weight, 16 if group_size == 16 else 32),
        scale,
        minimum,
        torch.tensor(weight.code_map.values).to(weight.codes.device),
        weight.code_map,
        group_size,
        None,
        minimum is not None,
        weight.input_order,
    )


def with_narrow_scales(packed: PackedCodes) -> PackedCodes:
    """Returns the same weight with scales and minimums of 16 bits if these are exact (see pack_codes)."""
    packed = replace(packed, narrow=_narrow_format(packed.scale, packed.minimum))
    if packed.narrow is None:
        return packed
    scale, minimum = packed.scale, packed.minimum
    low, high = (scale[::2], scale[1::2]) if packed.pairs else (scale, scale if minimum is None else minimum)
    return replace(packed, scale=_narrowed(low, high, packed.narrow), minimum=None)


def _group_size(weight: QuantizedWeight) -> int:
    """Returns the largest group size that kernels support and that divides the weight's group size."""
    if weight.group_size >= weight.shape[1]:
        return WHOLE_ROW
    if weight.group_size % STEP == 0:
        return weight.group_size
    return next(size for size in (64, 32, 16) if weight.group_size % size == 0)


def _by_group(part: Tensor, weight: QuantizedWeight, group_size: int) -> Tensor:
    """Converts scales or minimums [N, groups] to [groups, N], padded with zeros, as kernels read them."""
    n, k = weight.shape
    if group_size != WHOLE_ROW:
        part = part.repeat_interleave(weight.group_size // group_size, dim=1)
        groups = -(-_filled(k, STEP) // group_size)
        part = F.pad(part, (0, max(0, groups - part.shape[1])))[:, :groups]
    return F.pad(part, (0, 0, 0, _filled(n, ROWS) - n)).t().contiguous()


def _narrow_format(scale: Tensor, minimum: Tensor | None) -> torch.dtype | None:
    parts = [part for part in (scale, minimum) if part is not None]
    exact = (
        dtype
        for dtype in (torch.bfloat16, torch.float16)
        if all(torch.equal(part.to(dtype).float(), part) for part in parts)
    )
    return next(exact, None)


def _narrowed(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns int32 words whose halves are `low` and `high` in a 16-bit format."""
    return torch.stack((low.to(dtype), high.to(dtype)), dim=-1).view(torch.int32).squeeze(-1)


def _words(weight: QuantizedWeight, part_inputs: int) -> Tensor:
    """Returns the codes in the layout of PackedCodes.codes."""
    (n, k), bits = weight.shape, weight.code_map.bits
    tiles, steps, parts = -(-n // ROWS), -(-k // STEP), 16 // bits
    shape = steps, STEP // parts // part_inputs, parts, part_inputs
    words = torch.empty(tiles, *shape[:2], ROWS, part_inputs, dtype=torch.int16, device=weight.codes.device)
    for begin in range(0, n, ROWS_AT_ONCE):
        codes = weight.codes[begin : begin + ROWS_AT_ONCE]
        if weight.code_map == E4M3:
            codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
        codes = F.pad(codes, (0, steps * STEP - k, 0, -len(codes) % ROWS)).view(-1, ROWS, *shape)
        shifted = sum(codes[..., part, :].int() << bits * part for part in range(parts))
        words[begin // ROWS : begin // ROWS + len(codes)] = torch.as_tensor(shifted).permute(0, 2, 3, 1, 4)
    return words


def unpack_codes(packed: PackedCodes) -> QuantizedWeight:
    """Returns the weight that was packed. Its group size is that of the packed codes, which may be smaller than before
    packing.
    """
    (n, k), bits = packed.shape, packed.code_map.bits
    parts = [(packed.codes >> bits * part & (1 << bits) - 1).to(torch.uint8) for part in range(16 // bits)]
    codes = torch.stack(parts, dim=-2).permute(0, 3, 1, 2, 4, 5)  # [tiles, ROWS, steps, …, part, part_inputs]
    codes = codes.reshape(packed.padded_rows, -1)[:n, :k]
    scale, minimum = packed.scale, packed.minimum
    if packed.narrow is not None:
        halves = scale.unsqueeze(-1).view(packed.narrow).float()  # [groups or half of them, N, 2]
        if packed.has_minimum:
            scale, minimum = halves.unbind(-1)
        elif packed.pairs:
            scale = halves.movedim(-1, 1).flatten(0, 1)
        else:
            scale = halves[..., 0]
    groups = 1 if packed.group_size == WHOLE_ROW else -(-k // packed.group_size)
    by_row = [None if part is None else part[:groups, :n].t().contiguous() for part in (scale, minimum)]
    assert by_row[0] is not None
    return QuantizedWeight(
        codes, packed.code_map, by_row[0], by_row[1], packed.group_size or max(k, 16), packed.input_order
    )


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

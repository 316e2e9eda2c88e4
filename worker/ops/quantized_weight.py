"""Defines in PyTorch a weight whose numbers are codes of four or eight bits. The codes of a group share a scale.

    weight[n, k] = values[codes[n, k]] * scale[n, k // group_size] + minimum[n, k // group_size]

While a checkpoint is read, every quantized format becomes this one record: int8 and int4 with or without zero points,
GPTQ, AWQ, MXFP4, NF4, and the block formats of GGUF. `dequantize` defines its numbers. A product with a quantized
weight equals the product with the dequantized weight up to rounding. A GPU kernel rounds each number of the weight once
to the format in which it multiplies. The C library multiplies codes, and applies a group's scale to the sum of the
group's products (groups.h). Inputs keep their format with one exception: where codes stand for integers,
CPUs without AMX turn bfloat16 inputs into integers of 16 bits (integer_rows.h), or, if they are asked to, all CPUs turn
inputs into integers of 8 bits (int8_rows.h). All rows of a
batch are multiplied by the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodeMap:
    """Says which number each code stands for. `values` has an entry for every code of `bits` bits."""

    name: str
    bits: int
    values: tuple[float, ...]

    def numbers(self, codes: Tensor) -> Tensor:
        """Returns the numbers of codes, float32 in the shape of `codes`."""
        if self.values == _signed(self.bits):  # much faster than a table
            return (codes << 8 - self.bits).view(torch.int8).bitwise_right_shift_(8 - self.bits).float()
        return torch.tensor(self.values).to(codes.device)[codes.int()]


def _signed(bits: int) -> tuple[float, ...]:
    """Returns the numbers of two's complement codes in the order of the codes: 0, 1, …, -2, -1."""
    half = 1 << (bits - 1)
    return tuple(float(code - 2 * half if code >= half else code) for code in range(2 * half))


def _e4m3() -> tuple[float, ...]:
    """Returns the numbers of float8_e4m3fn. Its two NaNs become 0, because checkpoints with NaNs are refused."""
    return tuple(torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).tolist())


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4 = CodeMap("int4", 4, _signed(4))
INT8 = CodeMap("int8", 8, _signed(8))
E4M3 = CodeMap("e4m3", 8, _e4m3())
E2M1 = CodeMap("e2m1", 4, (*_E2M1, *(-value for value in _E2M1)))  # MXFP4, NVFP4
NF4 = CodeMap(  # the quantiles of a normal distribution, as defined by QLoRA
    "nf4", 4,
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)  # fmt: skip
IQ4_NL = CodeMap(  # the values of llama.cpp's IQ4_NL and IQ4_XS
    "iq4_nl", 4,
    (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)  # fmt: skip
NEGATIVE = 8  # in the codes of llama.cpp's formats with grids, the bit that says that the number is negative


def _with_signs(*numbers: float) -> tuple[float, ...]:
    """Returns the values of 16 codes: at most eight numbers and, from code NEGATIVE on, the same with a minus sign."""
    filled = (*numbers, *(0.0,) * (NEGATIVE - len(numbers)))
    return (*filled, *(-number for number in filled))


IQ2 = CodeMap("iq2", 4, _with_signs(8.0, 25.0, 43.0))
IQ3_XXS = CodeMap("iq3_xxs", 4, _with_signs(4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0))
IQ3_S = CodeMap("iq3_s", 4, _with_signs(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0))
# Eighths: IQ1 has the numbers -1, 0 and 1, and adds an eighth or, in the codes from NEGATIVE on, subtracts it.
IQ1 = CodeMap("iq1", 4, (-7.0, 1.0, 9.0, *(0.0,) * 5, -9.0, -1.0, 7.0, *(0.0,) * 5))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight [N, K]. A group is `group_size` consecutive codes of a row; the last group may be shorter.

    input_order: if given, codes[:, k] belongs to input input_order[k] of the layer (GPTQ's act-order)
    six_bits: whether all codes, which are INT8's, are integers from -32 to 31
    """

    codes: Tensor  # [N, K] uint8, one code per byte
    code_map: CodeMap
    scale: Tensor  # [N, groups] float32
    minimum: Tensor | None  # [N, groups] float32
    group_size: int  # a multiple of 16, or at least K: one group per row
    input_order: Tensor | None = None  # [K] int64, a permutation
    six_bits: bool = False

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        groups = (n, -(-k // self.group_size))
        assert self.codes.dtype == torch.uint8 and (self.group_size % 16 == 0 or self.group_size >= k)
        assert self.scale.shape == groups and self.scale.dtype == torch.float32
        assert self.minimum is None or (self.minimum.shape == groups and self.minimum.dtype == torch.float32)
        assert self.input_order is None or self.input_order.shape == (k,)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    @property
    def has_minimum(self) -> bool:
        return self.minimum is not None

    @property
    def code_bits(self) -> int:
        """In how many bits each code fits."""
        return 6 if self.six_bits else self.code_map.bits

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        """Returns a weight with the rows that `index` selects, in the order of `index`."""
        minimum = None if self.minimum is None else self.minimum[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], minimum=minimum)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K], computed in float32, rounded once to `dtype`. Inputs are in the layer's order."""
        n, k = self.shape
        weight = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        to = slice(None) if self.input_order is None else self.input_order

        def convert(part: slice) -> None:
            numbers = self.code_map.numbers(self.codes[part])
            self._scale(numbers, part)
            weight[part, to] = numbers.to(dtype)

        by_rows(n, k, convert, on_gpu=self.is_cuda)
        return weight

    def _scale(self, numbers: Tensor, rows: slice) -> None:
        """Multiplies numbers [rows, K] by the scales of their groups, and adds the minimums, in place."""
        k = self.shape[1]
        size = min(self.group_size, k)
        whole = k // size  # groups of `size` inputs; the last group may be shorter
        for groups, begin, end in ((slice(whole), 0, whole * size), (slice(whole, None), whole * size, k)):
            if begin == end:
                continue
            by_group = numbers[:, begin:end].unflatten(1, (-1, min(size, end - begin)))
            by_group *= self.scale[rows, groups, None]
            if self.minimum is not None:
                by_group += self.minimum[rows, groups, None]


class CodesInGroups(Protocol):
    """What a packed weight's format depends on: of a QuantizedWeight, or of a weight that is not unpacked yet."""

    @property
    def code_map(self) -> CodeMap: ...
    @property
    def group_size(self) -> int: ...
    @property
    def has_minimum(self) -> bool: ...
    @property
    def input_order(self) -> Tensor | None: ...


InCodes = TypeVar("InCodes", bound=CodesInGroups)


def stack(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Concatenates weights with the same inputs by rows. Neighbours in the same format become one weight."""
    return [joined(alike) for alike in runs_in_one_format(parts)]


def runs_in_one_format(parts: Sequence[InCodes]) -> list[list[InCodes]]:
    """Splits the parts into lists. Adjacent parts in the same format are in the same list."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        if _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def joined(alike: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenates the rows of weights in the same format."""
    first, *others = alike
    if not others:
        return first
    codes, scale = torch.cat([one.codes for one in alike]), torch.cat([one.scale for one in alike])
    minimums = [one.minimum for one in alike if one.minimum is not None]
    return replace(first, codes=codes, scale=scale, minimum=torch.cat(minimums) if minimums else None)


def _alike(a: CodesInGroups, b: CodesInGroups) -> bool:
    same_format = (a.code_map, a.group_size, a.has_minimum) == (b.code_map, b.group_size, b.has_minimum)
    if a.input_order is None or b.input_order is None:
        return same_format and a.input_order is b.input_order
    return same_format and torch.equal(a.input_order, b.input_order)


def quantize_groups(weight: Tensor, code_map: CodeMap, group_size: int) -> QuantizedWeight:
    """Quantizes a weight [N, K] symmetrically to INT4 or INT8: rounds to nearest, with one scale per group.

    With few codes, the other numbers of a group may be more accurate if the scale clips the largest one. So several
    scales are tried: for each factor in CLIPPING, one that maps this factor times the largest number to the largest
    code. The scale with the smallest squared error is chosen. Scales are rounded to bfloat16, because kernels read and
    multiply these faster; an error of 0.2 % in a scale costs next to no accuracy.
    """
    n, k = weight.shape
    groups = -(-k // group_size)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(n, groups, device=weight.device)

    def convert(part: slice) -> None:
        x = torch.nn.functional.pad(weight[part].float(), (0, groups * group_size - k)).view(-1, groups, group_size)
        steps, rounded = _best_steps(x, code_map.bits), torch.empty_like(x)
        _round(x, steps, code_map.bits, out=rounded)
        codes[part] = _as_codes(rounded.to(torch.int8).flatten(1)[:, :k], code_map.bits)
        scale[part] = steps.squeeze(2)

    by_rows(n, k, convert, on_gpu=weight.is_cuda)
    return QuantizedWeight(codes, code_map, scale, None, group_size)


CLIPPING = {4: (1.0, 0.94, 0.88, 0.82, 0.76), 8: ()}  # bits → fractions of the largest number that are tried


def _best_steps(x: Tensor, bits: int) -> Tensor:
    """Chooses the scales [rows, groups, 1] for numbers x [rows, groups, size]."""
    largest = divided(x.abs().amax(dim=2, keepdim=True), (1 << (bits - 1)) - 1)
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    best, chosen, error = torch.full_like(largest, torch.inf), _in_bfloat16(largest), torch.empty_like(x)
    for clip in CLIPPING[bits]:
        steps = _in_bfloat16(largest * clip)
        _round(x, steps, bits, out=error)
        distance = torch.linalg.vector_norm(error.mul_(steps).sub_(x), dim=2, keepdim=True)
        chosen = torch.where(distance < best, steps, chosen)
        best = torch.minimum(distance, best)
    return chosen


def _in_bfloat16(scale: Tensor) -> Tensor:
    return scale.bfloat16().float()


def _round(x: Tensor, steps: Tensor, bits: int, *, out: Tensor) -> None:
    """Writes to `out`, as float32, the signed code that is nearest to each number of x."""
    half = 1 << (bits - 1)
    torch.mul(x, 1 / steps, out=out).round_().clamp_(-half, half - 1)


def _as_codes(numbers: Tensor, bits: int) -> Tensor:
    """Returns the codes of INT4 or INT8 for int8 numbers."""
    return numbers.view(torch.uint8) & ((1 << bits) - 1)


# Quantizes weights to eight bits: symmetric, with one fp32 scale for each output channel (row) and no zero points.
#
# `int8` stores seven bits and a sign relative to the largest value of the row. `fp8` is e4m3 (float8_e4m3fn), whose
# steps grow with the value, so small weights keep more precision if the row also has a large weight.
#
# Activations may be quantized too, dynamically, right before a matrix product. The scale of a token depends only on
# its own row, so the token's bits do not depend on other tokens.

Kind = Literal["int8", "fp8"]
FORMATS: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS_AT_ONCE = 1024  # how many rows are converted at once, so that a whole weight is never in float32
KINDS: Mapping[torch.dtype, Kind] = {format: kind for kind, format in FORMATS.items()}
LARGEST: Mapping[Kind, float] = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantized. Its text is fp8, int8, fp8-dynamic or int8-dynamic."""

    kind: Kind
    dynamic: bool = False  # if true, inputs are quantized, too, with a scale for each token

    @classmethod
    def of(cls, name: str) -> "Scheme":
        kind: Kind = "fp8" if name.startswith("fp8") else "int8"
        return cls(kind, name.endswith("-dynamic"))

    def __str__(self) -> str:
        return self.kind + ("-dynamic" if self.dynamic else "")


def divided(x: Tensor, divisor: float) -> Tensor:
    """Returns x / divisor, with the same bits on every device.

    PyTorch's CUDA kernel would multiply by the reciprocal of a Python number, which rounds twice. The scale then
    differs in its last bit, and numbers halfway between two codes are rounded to the other code.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Quantizes a weight [N, K] of any float dtype to values [N, K] of FORMATS[kind] and a scale [N] float32.

    The largest value of a row maps to the largest value of the format. A row of zeros stays zeros.
    """
    values, largest_value = torch.empty(weight.shape, dtype=FORMATS[kind], device=weight.device), LARGEST[kind]
    scale = torch.empty(len(weight), device=weight.device)
    for part, target, largest in zip(*(whole.split(ROWS_AT_ONCE) for whole in (weight, values, scale)), strict=True):
        x_fp32 = part.float()
        largest.copy_(divided(x_fp32.abs().amax(dim=1), largest_value).clamp(min=torch.finfo(torch.float32).tiny))
        scaled = (x_fp32 / largest[:, None]).clamp(-largest_value, largest_value)
        target.copy_(scaled.round() if kind == "int8" else scaled)
    return values, scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values [N, K] times scale ([N], or [N, K]), computed in float32 and rounded once to `dtype`."""
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part, target, row_scale in zip(*(whole.split(ROWS_AT_ONCE) for whole in (values, weight, scale)), strict=True):
        target.copy_(part.float() * (row_scale[:, None] if row_scale.dim() == 1 else row_scale))
    return weight


def linear_quantized_torch(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, *, dynamic: bool = False
) -> Tensor:
    """Defines `linear` with a quantized weight: returns x [T, K] @ values.T * scale [N] + bias [N], [T, N].

    Computes in float32 and rounds once to x's dtype. dynamic: if true, x is quantized first, and each row of the
    product is multiplied by its token's scale before the bias is added.
    """
    tokens, token_scale = quantize_tokens(x, values.dtype) if dynamic else (x, None)
    total = F.linear(tokens.float(), values.float()) * scale
    total = total if token_scale is None else total * token_scale[:, None]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def quantize_tokens(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes x [T, K] of any float dtype to values [T, K] of dtype `format` and a scale [T] float32.

    Rounds x * (1 / scale) once. If one value of a row is not finite, the whole row becomes not finite.
    """
    largest_value, x_fp32 = float(LARGEST[KINDS[format]]), x.float()
    scale = divided(x_fp32.abs().amax(dim=1), largest_value).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (x_fp32 * (1 / scale)[:, None]).clamp(-largest_value, largest_value)
    return (scaled.round() if format == torch.int8 else scaled).to(format), scale


# Converts a large tensor in slices of rows. On the CPU, threads convert several slices at once, one thread per slice.
#
# A conversion consists of many short operations. If several threads shared each operation, they would wait for each
# other at its end, and longer if other processes use the cores. So one thread runs all operations of a slice. With
# larger slices, threads wait less often for Python's GIL. With smaller slices, the temporaries stay in the caches.

# numbers in a slice; a GPU gets larger slices, because it launches a kernel for each operation
CPU_NUMBERS, GPU_NUMBERS = 1 << 20, 1 << 22
FEW = 2  # with so few slices, converting takes less time than starting threads


def by_rows(rows: int, columns: int, convert: Callable[[slice], None], *, on_gpu: bool) -> None:
    """Calls convert(slice) for slices that cover all rows. The slices must not depend on each other."""
    size = max(1, (GPU_NUMBERS if on_gpu else CPU_NUMBERS) // columns)
    slices, own = [slice(begin, begin + size) for begin in range(0, rows, size)], torch.get_num_threads()
    if on_gpu or own == 1 or torch.is_inference_mode_enabled():  # other threads would not be in inference mode
        for part in slices:
            convert(part)
        return
    try:
        torch.set_num_threads(1)
        if len(slices) <= FEW:
            for part in slices:
                convert(part)
            return
        with ThreadPoolExecutor(min(own, len(slices)), "convert", partial(torch.set_num_threads, 1)) as pool:
            for _ in pool.map(convert, slices):
                pass  # the loop re-raises an exception of a slice
    finally:
        torch.set_num_threads(own)  # also the default of threads that start later

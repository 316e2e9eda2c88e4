"""Packs weights for the matmul of the C library: tensors, or codes with scales (worker/ops/quantized_weight.py).

If rows of a weight have different formats, the packed weight has several parts. Each part has a C struct
(csrc/weight.h). This module knows the layout of memory; pack.c and pack_codes.c fill the memory.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from worker.ops.block_rows import BlockRows, joined_rows
from worker.ops.native import (
    PANEL,
    Memory,
    address,
    available,
    fresh_memory,
    kernels,
    library,
    multiplies_bf16,
    tier,
)
from worker.ops.quantized_weight import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    CodeMap,
    QuantizedWeight,
    joined,
    runs_in_one_format,
)

LAYOUT = 6  # version of packed weights: to be raised if csrc/weight.h or the choice of quantized codes changes
K_STEP = 32  # how many inputs a step of a bf16 kernel multiplies
CODE_BLOCK = 16  # inputs of a block of codes
# The kinds of numbers in weight.h. PLAIN: of the weight's dtype; INTEGER4, 6, 8: codes that are multiplied as
# integers; INT8_INPUTS4, 6, 8: codes that are multiplied by inputs of 8 bits; the other kinds: codes whose values are
# multiplied.
PLAIN, TABLE4, INT8_VALUES, E4M3_VALUES, *OF_INTEGERS = range(10)
INTEGER4, INTEGER6, INTEGER8, INT8_INPUTS4, INT8_INPUTS6, INT8_INPUTS8 = OF_INTEGERS
SIX_BITS = {INTEGER8: INTEGER6, INT8_INPUTS8: INT8_INPUTS6}  # the kind if all codes of INT8 fit in six bits
KINDS = {INT8: INT8_VALUES, E4M3: E4M3_VALUES}  # all other codes have four bits
# Codes whose values are small integers or multiples of 0.5
INTEGER_KINDS = {
    INT4: INTEGER4,
    E2M1: INTEGER4,
    IQ4_NL: INTEGER4,
    IQ3_S: INTEGER4,
    IQ3_XXS: INTEGER4,
    IQ2: INTEGER4,
    IQ1: INTEGER4,
    INT8: INTEGER8,
}
# The same codes, for inputs of 8 bits
INT8_INPUT_KINDS = {code_map: INT8_INPUTS8 if code_map is INT8 else INT8_INPUTS4 for code_map in INTEGER_KINDS}
LARGEST_INPUT = 255 << 7  # the largest integer that an input becomes (csrc/integer/integer_rows.h)
FOR_FP32, FOR_BF16_PAIRS, FOR_INTEGERS, FOR_INT8 = range(4)  # CodeOrder of weight.h
Coded = QuantizedWeight | BlockRows  # a quantized weight, unpacked or not
Rows = TypeVar("Rows", Tensor, Coded)  # a weight, or some of its rows
E4M3_FACTOR = 256.0  # the library reads the bits of e4m3 as fp16, which makes the numbers 2^8 times too small


class WeightStruct(Structure):
    """struct Weight of csrc/weight.h."""


WeightStruct._fields_ = [
    *((name, c_void_p) for name in ("panels", "bias", "input_order", "values")),
    ("next", POINTER(WeightStruct)),
    *((name, c_long) for name in ("n", "k", "group")),
    *((name, c_int) for name in ("kind", "has_minimum", "scale_bytes")),
    ("factor", c_float),
]


class GemmJob(Structure):
    """struct GemmJob of csrc/weight.h."""

    _fields_ = [*((name, c_void_p) for name in ("weights", "x", "out")), ("t", c_long)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPart:
    """The packed rows of a weight that have the same format. The fields are those of struct Weight, as tensors or
    numbers.
    """

    panels: Tensor
    values: Tensor | None = None
    input_order: Tensor | None = None
    bias: Tensor | None = None
    n: int
    k: int
    group: int = 0
    kind: int = PLAIN
    has_minimum: bool = False
    scale_bytes: int = 0
    factor: float = 0.0

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def struct(self) -> WeightStruct:
        addresses = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        return WeightStruct(**addresses, **{name: getattr(self, name) for name in NUMBERS})


TENSORS = ("panels", "values", "input_order", "bias")
NUMBERS = ("n", "k", "group", "kind", "has_minimum", "scale_bytes", "factor")


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A weight [n, k] with its bias, packed for the matmul of inputs of `dtype`."""

    parts: tuple[PackedPart, ...]  # each part computes some columns of the product
    dtype: torch.dtype
    structs: tuple[WeightStruct, ...] = field(init=False)  # the structs of the parts; a struct points to the next one

    def __post_init__(self) -> None:
        assert self.parts and all(part.k == self.k for part in self.parts)
        structs = tuple(part.struct() for part in self.parts)
        for struct, following in pairwise(structs):
            struct.next = ctypes.pointer(following)
        object.__setattr__(self, "structs", structs)

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def struct(self) -> WeightStruct:
        """The struct of the first part. It is the head of a linked list of all parts."""
        return self.structs[0]

    @property
    def nbytes(self) -> int:
        """How many bytes the packed weight takes; a product reads all of them."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors.values())


def layout(dtype: torch.dtype) -> str:
    """Returns a name for the layout in which this processor packs weights for inputs of `dtype`."""
    kinds = (_kind(code_map, group, dtype) for code_map, group in ((INT4, K_STEP), (INT8, K_STEP), (E4M3, K_STEP)))
    return "-".join(("fp32", "pairs", "integers")[_code_order(kind, dtype)] for kind in kinds)


def pack_weight(
    parts: Sequence[Tensor | Coded],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    memory: Memory | None = None,
    int8_inputs: bool = False,
) -> CpuWeight:
    """Packs one weight [N, K] for inputs of `dtype`. Its rows are the rows of `parts`, one part after another.

    A part is a contiguous tensor of `dtype`, or quantized. A part in blocks is unpacked panel by panel, so that the
    codes of the whole weight need no memory. Scales and minimums keep 24 bits for float32 inputs, and 11 bits (fp16
    times a power of two) for bfloat16 inputs. bias [N] is kept in fp32.
    memory: allocates the packed tensors; by default, each tensor gets memory of its own
    int8_inputs: whether codes of INT8_INPUT_KINDS are multiplied by inputs that are rounded to 8 bits, in blocks of 32
    with a scale each (csrc/integer/int8_rows.h)
    """
    assert available(dtype)
    memory = memory or fresh_memory
    packed: list[PackedPart] = []
    begin = 0
    for one in _pack_runs(parts, dtype, memory, int8_inputs):
        end = begin + one.n
        packed.append(one if bias is None else replace(one, bias=_copied(bias[begin:end], torch.float32, memory)))
        begin = end
    assert bias is None or bias.shape == (begin,)
    return CpuWeight(tuple(packed), dtype)


def _pack_runs(
    parts: Sequence[Tensor | Coded], dtype: torch.dtype, memory: Memory, int8_inputs: bool
) -> Iterator[PackedPart]:
    """Packs parts. If all are tensors, they become one part. If all are quantized, adjacent parts in the same format
    become one part. In all other cases, every part stays a part of its own.
    """
    tensors = [part for part in parts if isinstance(part, Tensor)]
    quantized = [part for part in parts if not isinstance(part, Tensor)]
    if not quantized:
        yield _pack_tensors(tensors, dtype, memory)
    elif not tensors:
        for run in runs_in_one_format(quantized):
            for _, alike in groupby(run, lambda part: part.code_bits):
                yield _pack_codes(list(alike), dtype, memory, int8_inputs)
    else:
        for part in parts:
            if isinstance(part, Tensor):
                yield _pack_tensors([part], dtype, memory)
            else:
                yield _pack_codes([part], dtype, memory, int8_inputs)


def _copied(tensor: Tensor, dtype: torch.dtype, memory: Memory) -> Tensor:
    return memory(tensor.shape, dtype).copy_(tensor)


def _pack_tensors(weights: Sequence[Tensor], dtype: torch.dtype, memory: Memory) -> PackedPart:
    n, k = sum(map(len, weights)), weights[0].shape[1]
    depth = -(-k // K_STEP) * K_STEP if dtype == torch.bfloat16 else k
    panels = memory((-(-n // PANEL), depth, PANEL), dtype)
    for first, weight in _whole_panels(weights, torch.cat):
        assert weight.dtype == dtype and weight.is_contiguous()
        to = panels[first:].data_ptr()
        kernels()[dtype].pack(weight.data_ptr(), to, len(weight), k, torch.get_num_threads())
    return PackedPart(panels=panels, n=n, k=k)


def _pack_codes(weights: Sequence[Coded], dtype: torch.dtype, memory: Memory, int8_inputs: bool) -> PackedPart:
    """Packs the rows of weights in the same format, one weight after another."""
    any_weight = weights[0]
    kind = _kind(any_weight.code_map, _group(any_weight), dtype, int8_inputs, any_weight.code_bits)
    order, size = _code_order(kind, dtype), any_weight.group_size
    if order == FOR_BF16_PAIRS and CODE_BLOCK < size < any_weight.shape[1] and size % K_STEP:
        weights = [_with_groups_of_a_block(_unpacked(weight)) for weight in weights]
    part = _empty_part(weights, kind, 4 if dtype == torch.float32 else 2, memory)
    for first, weight in _whole_panels(weights, _joined):
        _write_panels(replace(part, panels=part.panels[first:], n=weight.shape[0]), weight, order)
        assert weight.code_map is not E4M3 or not weight.has_minimum
    return replace(part, factor=part.factor * E4M3_FACTOR) if any_weight.code_map is E4M3 else part


def _write_panels(part: PackedPart, weight: Coded, order: int) -> None:
    """Writes the panels of a part, which has the rows of `weight` alone."""
    found, threads = library(), torch.get_num_threads()
    assert found is not None
    struct = ctypes.byref(part.struct())
    how = c_int(order), c_int(_flip(weight.code_map, part.kind)), c_int(threads)
    if isinstance(weight, BlockRows) and weight.format.is_unpacked_in_c:
        assert weight.stored.is_contiguous() and part.group == weight.group_size
        groups = weight.shape[1] // weight.group_size
        scratch = torch.empty(threads, PANEL * (weight.shape[1] + 8 * groups), dtype=torch.uint8)
        rows = c_void_p(weight.stored.data_ptr()), c_void_p(scratch.data_ptr())
        found.pack_blocks(struct, *weight.format.in_c, *rows, *how)
        return
    unpacked = _unpacked(weight)
    codes, scale = unpacked.codes.contiguous(), unpacked.scale.contiguous()
    minimum = None if unpacked.minimum is None else unpacked.minimum.contiguous()
    found.pack_codes(struct, *(c_void_p(address(one)) for one in (codes, scale, minimum)), *how)


def _unpacked(weight: Coded) -> QuantizedWeight:
    return weight.quantized() if isinstance(weight, BlockRows) else weight


def order_of_codes(weight: CpuWeight, code_map: CodeMap) -> tuple[int, int]:
    """Returns the order in which the first part of a weight has its codes, and the bits that are inverted in a code."""
    kind = weight.parts[0].kind
    return _code_order(kind, weight.dtype), _flip(code_map, kind)


def _joined(weights: list[Coded]) -> Coded:
    """Concatenates the rows of weights in the same format, of which some may be in blocks, also of different kinds."""
    in_blocks = [weight for weight in weights if isinstance(weight, BlockRows)]
    if len(in_blocks) == len(weights) and len({weight.format.name for weight in in_blocks}) == 1:
        return joined_rows(in_blocks)
    return joined([_unpacked(weight) for weight in weights])


def _whole_panels(weights: Sequence[Rows], join: Callable[[list[Rows]], Rows]) -> Iterator[tuple[int, Rows]]:
    """Yields each weight with the index of its first panel. If weights would share a panel, all of them are joined."""
    if any(weight.shape[0] % PANEL for weight in weights[:-1]):
        weights = [join(list(weights))]
    first = 0
    for weight in weights:
        yield first, weight
        first += weight.shape[0] // PANEL


def _with_groups_of_a_block(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the same weight with groups of CODE_BLOCK inputs, half a step. Groups of 48 inputs, for example, would
    end within a step."""
    groups = -(-weight.shape[1] // CODE_BLOCK)

    def repeated(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(weight.group_size // CODE_BLOCK, dim=1)[:, :groups]

    minimum = None if weight.minimum is None else repeated(weight.minimum)
    return replace(weight, scale=repeated(weight.scale), minimum=minimum, group_size=CODE_BLOCK)


def _group(weight: Coded) -> int:
    """Returns how many inputs share a scale in the packed weight."""
    k = weight.shape[1]
    return weight.group_size if weight.group_size < k else -(-k // CODE_BLOCK) * CODE_BLOCK


def _empty_part(weights: Sequence[Coded], kind: int, scale_bytes: int, memory: Memory) -> PackedPart:
    """Returns a part for the rows of weights in the same format. Its panels are not written yet."""
    weight, n = weights[0], sum(weight.shape[0] for weight in weights)
    k = weight.shape[1]
    bits, has_minimum = 6 if kind in SIX_BITS.values() else weight.code_map.bits, weight.has_minimum
    assert weight.code_map.bits == 4 or weight.code_map in KINDS
    group = _group(weight)
    group_bytes = PANEL * scale_bytes * (1 + has_minimum) + group * PANEL * bits // 8
    numbers = weight.code_map.values if bits == 4 else (0.0,) * 16
    flip = _flip(weight.code_map, kind) & 15
    values = torch.tensor([numbers[code ^ flip] for code in range(16)])
    order = weight.input_order
    return PackedPart(
        panels=memory((-(-n // PANEL), -(-k // group), group_bytes), torch.uint8),
        values=_copied(values, torch.float32, memory),
        input_order=None if order is None else _copied(order, torch.int64, memory),
        n=n, k=k, group=group, kind=kind, has_minimum=has_minimum, scale_bytes=scale_bytes,
        factor=1.0 if scale_bytes == 4 else _factor(weights),
    )  # fmt: skip


def _flip(code_map: CodeMap, kind: int) -> int:
    """Returns the mask of the bits that packing inverts in every code (see pack_codes.c)."""
    return 8 if code_map is INT4 else 32 if kind in SIX_BITS.values() else 0


def _kind(code_map: CodeMap, group: int, dtype: torch.dtype, int8_inputs: bool = False, bits: int = 8) -> int:
    """Returns the kind of numbers in weight.h for codes.

    group: inputs of a group; dtype: the dtype of inputs; bits: in how many bits each code of INT8 fits
    """
    if int8_inputs and code_map in INT8_INPUT_KINDS:
        return _narrowed(INT8_INPUT_KINDS[code_map], bits)
    as_integers = code_map in INTEGER_KINDS and dtype == torch.bfloat16
    if as_integers and tier() != "amx":
        return _narrowed(INTEGER_KINDS[code_map], bits)
    if as_integers and _exact_in_tiles(code_map, group):
        return INTEGER_KINDS[code_map]  # tiles have no kernel for six bits, which need eight
    return KINDS.get(code_map, TABLE4)


def _narrowed(kind: int, bits: int) -> int:
    return SIX_BITS.get(kind, kind) if bits <= 6 else kind


def _exact_in_tiles(code_map: CodeMap, group: int) -> bool:
    """Returns whether AMX can multiply codes of this kind as integers: the sums of a group must be exact in fp32, and a
    group must be half a step of K_STEP inputs, or whole steps.

    With codes of eight bits, inputs get fewer bits, so that sums fit (dropped_bits, csrc/integer/integer_rows.h).
    """
    if code_map.bits == 8:
        return group in (CODE_BLOCK, K_STEP)
    values = code_map.values
    largest = max(map(abs, values)) * (1 if all(value.is_integer() for value in values) else 2)
    return largest * LARGEST_INPUT * group <= 1 << 24 and (group == CODE_BLOCK or group % K_STEP == 0)


def _code_order(kind: int, dtype: torch.dtype) -> int:
    """Returns the order in which the kernel for this kind of numbers and for inputs of `dtype` reads codes."""
    if kind in (INTEGER4, INTEGER6, INTEGER8):
        return FOR_INTEGERS
    if kind in (INT8_INPUTS4, INT8_INPUTS6, INT8_INPUTS8):
        return FOR_INT8
    return FOR_BF16_PAIRS if dtype == torch.bfloat16 and multiplies_bf16() else FOR_FP32


def _factor(weights: Sequence[Coded]) -> float:
    """Returns the power of two by which scales and minimums are divided, so that the largest is near fp16's largest."""
    largest = max(map(_largest, weights))
    return 2.0 ** (math.frexp(largest)[1] - 15) if largest else 1.0


def _largest(weight: Coded) -> float:
    """Returns the largest absolute value of a weight's scales and minimums."""
    if isinstance(weight, BlockRows):
        return weight.largest()
    numbers = [x for x in (weight.scale, weight.minimum) if x is not None]
    return max(max(-low, high) for low, high in (map(Tensor.item, x.aminmax()) for x in numbers))


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The packed weight [n, k] of one expert."""

    struct: WeightStruct
    n: int
    k: int
    dtype: torch.dtype


AnyWeight = CpuWeight | ExpertWeight


def linear(x: Tensor, weight: AnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """Returns x [T, K] @ weight.T + bias, [T, N], in x's dtype or, if `out_dtype` is float32, unrounded in fp32.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    return linears([(x, weight)], out_dtype)[0]


def linears(jobs: Sequence[tuple[Tensor, AnyWeight]], out_dtype: torch.dtype | None = None) -> list[Tensor]:
    """Returns `linear` for each pair of x and weight. All x have the same dtype.

    The threads share the work of all products, so a small product takes little more time than reading its weight."""
    dtype = jobs[0][0].dtype
    assert out_dtype in (None, dtype, torch.float32)
    outs = [torch.empty(x.shape[0], weight.n, dtype=out_dtype or dtype) for x, weight in jobs]
    structs = (GemmJob * len(jobs))()
    for struct, (x, weight), out in zip(structs, jobs, outs, strict=True):
        assert x.ndim == 2 and x.is_contiguous() and x.dtype == dtype == weight.dtype and x.shape[1] == weight.k
        struct.weights, struct.t = ctypes.addressof(weight.struct), x.shape[0]
        struct.x, struct.out = x.data_ptr(), out.data_ptr()
    if kernels()[dtype].gemm(
        ctypes.addressof(structs), len(jobs), outs[0].dtype == torch.bfloat16, torch.get_num_threads()
    ):  # fmt: skip
        raise MemoryError("no memory for the buffers of a matmul")
    return outs

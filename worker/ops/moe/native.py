"""Calls the C library for a mixture of experts (csrc/experts.c).

The structures have the same fields, in the same order, as the structs in csrc/experts.h.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_long, c_void_p, cast, sizeof
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.exchange import RanksC
from worker.ops.linear.native import (
    NUMBERS,
    TENSORS,
    Coded,
    CpuWeight,
    ExpertWeight,
    GemmJob,
    WeightStruct,
    pack_weight,
)
from worker.ops.native import ALIGNMENT, MAX_CHOSEN, MAX_GROUPS, address, fresh_memory, kernels, library
from worker.spec import ExpertGroups

# Packs one linear of all experts of a layer (gate_up or down) into a few pieces of memory.
#
# The weight of an expert is packed like any other weight (linear/native.py).

# a struct as numbers: its NUMBERS, the places of its TENSORS (see CpuExperts.records), and the next struct's index
Record = list[int | float | None]


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """One linear of `count` experts with its biases, packed for the matmul of inputs of `dtype`."""

    pieces: tuple[Tensor, ...]  # the memory of all weights: uint8
    structs: "ctypes.Array[WeightStruct]"  # the first part of each expert, then all further parts of experts
    count: int
    dtype: torch.dtype

    @property
    def n(self) -> int:
        return columns(self.structs[0])

    @property
    def k(self) -> int:
        return int(self.structs[0].k)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def weight(self, expert: int) -> ExpertWeight:
        """Returns the weight of one expert for bindings.linear. It is valid as long as this record."""
        return ExpertWeight(self.structs[expert], self.n, self.k, self.dtype)

    @property
    def records(self) -> list[Record]:
        """The structs as numbers, with places instead of addresses. A place is a byte offset in all pieces laid end to
        end.
        """
        return [self._record(struct) for struct in self.structs]

    def _record(self, struct: WeightStruct) -> Record:
        following = addressof(struct.next.contents) - addressof(self.structs) if struct.next else None
        return [
            *(getattr(struct, name) for name in NUMBERS),
            *(self._place(getattr(struct, name)) for name in TENSORS),
            None if following is None else following // sizeof(WeightStruct),
        ]

    def _place(self, address: int | None) -> int | None:
        begin = 0
        if address is None:
            return None
        for piece in self.pieces:
            if 0 <= address - piece.data_ptr() < piece.nbytes:
                return begin + address - piece.data_ptr()
            begin += piece.nbytes
        raise ValueError("an address is outside of the memory of the experts")


def columns(struct: WeightStruct) -> int:
    """Returns how many columns a part and all parts after it have together."""
    return int(struct.n) + (columns(struct.next.contents) if struct.next else 0)


def from_records(pieces: Sequence[Tensor], records: Sequence[Record], dtype: torch.dtype) -> CpuExperts:
    """Makes experts from CpuExperts.records and a copy of CpuExperts.pieces."""
    structs = (WeightStruct * len(records))()
    for struct, record in zip(structs, records, strict=True):
        numbers, places, following = record[: len(NUMBERS)], record[len(NUMBERS) : -1], record[-1]
        for name, number in zip(NUMBERS, numbers, strict=True):
            setattr(struct, name, number)
        for name, place in zip(TENSORS, places, strict=True):
            setattr(struct, name, None if place is None else _address(pieces, int(place)))
        if following is not None:
            struct.next = ctypes.pointer(structs[int(following)])
    others = sum(record[-1] is not None for record in records)
    return CpuExperts(tuple(pieces), structs, len(records) - others, dtype)


def _address(pieces: Sequence[Tensor], place: int) -> int:
    for piece in pieces:
        if place < piece.nbytes:
            return piece.data_ptr() + place
        place -= piece.nbytes
    raise ValueError("a place is beyond the memory of the experts")


class Arena:
    """Allocates memory for `count` experts in a few pieces. The experts need about the same amount of memory."""

    def __init__(self, count: int) -> None:
        self.pieces: list[Tensor] = []
        # how many experts are not packed yet; how many bytes of the last piece are in use
        self._left, self._used = count, 0
        self._of_this, self._of_last = 0, 0  # bytes of the current expert, and of the expert before it

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory for a tensor. The gap behind the tensor is filled with zeros."""
        nbytes = math.prod(shape) * dtype.itemsize
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not self.pieces or self._used + room > self.pieces[-1].nbytes:
            self._trim()
            self.pieces.append(fresh_memory((max(room, self._of_last * self._left),), torch.uint8))
            self._used = 0
        begin, self._used = self._used, self._used + room
        self._of_this += room
        # so that equal weights give equal pieces, byte for byte
        self.pieces[-1][begin + nbytes : self._used].zero_()
        return self.pieces[-1][begin : begin + nbytes].view(dtype).view(*shape)

    def end_expert(self) -> None:
        self._left, self._of_last, self._of_this = self._left - 1, self._of_this, 0

    def end(self) -> tuple[Tensor, ...]:
        """Returns all pieces. The unused end of the last piece is cut off."""
        self._trim()
        return tuple(self.pieces)

    def _trim(self) -> None:
        if self.pieces:
            self.pieces[-1] = self.pieces[-1][: self._used]


def pack_experts_in_c(
    experts: Iterable[Sequence[Tensor | Coded]],
    bias: Tensor | None,
    *,
    count: int,
    dtype: torch.dtype,
    int8_inputs: bool = False,
) -> CpuExperts:
    """Packs the weights of `count` experts. experts: for each expert the parts of its weight [N, K], as in pack_weight

    bias: [count, N]; int8_inputs: as for pack_weight
    """
    arena, first, others = Arena(count), list[WeightStruct](), list[WeightStruct]()
    following: list[tuple[int, int]] = []  # (index of a struct, index of the struct to which it points)
    for number, parts in enumerate(experts):
        own_bias = None if bias is None else bias[number]
        weight = pack_weight(parts, own_bias, dtype=dtype, memory=arena.take, int8_inputs=int8_inputs)
        arena.end_expert()
        first.append(weight.structs[0])
        for index, struct in enumerate(weight.structs[1:]):
            following.append((number if index == 0 else count + len(others) - 1, count + len(others)))
            others.append(struct)
    structs = (WeightStruct * (count + len(others)))(*first, *others)
    for number, other in following:
        structs[number].next = cast(addressof(structs[other]), POINTER(WeightStruct))
    assert len(first) == count and len({(columns(struct), struct.k) for struct in first}) == 1
    return CpuExperts(arena.end(), structs, count, dtype)


KERNELS = ("gemm", "act_and_mul", "activate", "combine")  # the functions of struct ExpertKernels, in its order


class ExpertKernelsStruct(Structure):
    _fields_ = [*((name, c_void_p) for name in KERNELS), ("is_bf16", c_int)]


class ExpertsStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("router", "gate_up", "down", "scales", "choice_bias", "loads", "ranks")),
        *((name, c_long) for name in ("count", "chosen", "groups", "chosen_groups", "best_of_group")),
        ("sigmoid", c_int), ("normalized", c_int), ("activation", c_int),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CExperts:
    """The experts of a layer. E: the number of experts; H: hidden size; I: intermediate size."""

    router: CpuWeight  # H → E
    gate_up: CpuExperts  # H → 2 I: gate, then up; H → I without a gate
    down: CpuExperts  # I → H
    scales: Tensor | None  # [E] float32: factors of the routing weights
    choice_bias: Tensor | None  # [E] float32: added to the scores when experts are chosen, not to the weights
    loads: Tensor | None  # [E] int64: counts the rows that choose each expert
    chosen: int  # how many experts each row chooses
    sigmoid: bool  # if true, routing weights are sigmoids of the logits, else their softmax
    normalized: bool  # if true, the weights of a row's experts are divided by their sum
    activation: int  # its index in ACTIVATIONS of worker/spec.py
    groups: ExpertGroups | None = None

    def struct(self, ranks: RanksC | None = None, parts: int = 0) -> ExpertsStruct:
        """Returns a struct that is valid as long as this record exists.

        ranks: the processes that hold the other rows of gate_up and down; None if this process holds all rows
        parts: how many processes hold rows of gate_up and down; 0: as many as `ranks` says
        """
        parts = parts or (1 if ranks is None else ranks.count)
        count, hidden, inner = self.gate_up.count, self.gate_up.k, self.down.k
        assert self.router.n == self.down.count == count and 0 < self.chosen <= min(count, MAX_CHOSEN)
        assert self.router.k == parts * self.down.n == hidden and parts * self.gate_up.n in (inner, 2 * inner)
        for each in (self.scales, self.choice_bias):
            assert each is None or (each.dtype == torch.float32 and each.shape == (count,) and each.is_contiguous())
        of = self.groups or ExpertGroups(1, 1, 1)
        assert of.count <= MAX_GROUPS and count % of.count == 0 and of.best <= min(2, count // of.count)
        assert 0 < of.chosen <= of.count and self.chosen <= of.chosen * (count // of.count)
        assert self.loads is None or (self.loads.dtype == torch.int64 and self.loads.shape == (count,))
        return ExpertsStruct(
            ctypes.addressof(self.router.struct),
            ctypes.addressof(self.gate_up.structs),
            ctypes.addressof(self.down.structs),
            address(self.scales), address(self.choice_bias), address(self.loads),
            None if ranks is None else ctypes.addressof(ranks.struct),
            count, self.chosen, of.count, of.chosen, of.best, self.sigmoid, self.normalized, self.activation,
        )  # fmt: skip


def expert_kernels(dtype: torch.dtype) -> ExpertKernelsStruct:
    functions = kernels()[dtype]
    addresses = (ctypes.cast(getattr(functions, name), c_void_p) for name in KERNELS)
    return ExpertKernelsStruct(*addresses, dtype == torch.bfloat16)


def scratch_bytes(experts: ExpertsStruct, dtype: torch.dtype, rows: int) -> int:
    """Returns how many bytes of scratch memory the library needs to compute `rows` rows."""
    found = library()
    assert found is not None
    found.experts_scratch.restype = c_long
    return int(found.experts_scratch(ctypes.byref(experts), c_int(dtype == torch.bfloat16), c_long(rows)))


def experts(
    h: Tensor,
    layer: CExperts,
    *,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
) -> Tensor:
    """Computes the same as `experts_torch` in worker/ops/moe/packed.py. h [T, H] contiguous.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    (t, hidden), dtype, found, struct = h.shape, h.dtype, library(), layer.struct()
    assert found is not None and h.is_contiguous() and hidden == layer.router.k and dtype == layer.gate_up.dtype
    for rows in (router_input, add):
        assert rows is None or (rows.shape == h.shape and rows.dtype == dtype and rows.is_contiguous())
    assert add_gate is None or (add_gate.numel() == t and add_gate.dtype == torch.float32 and add_gate.is_contiguous())
    out = torch.empty_like(h)
    scratch = torch.empty(scratch_bytes(struct, dtype, t), dtype=torch.uint8)
    if found.experts_forward(
        ctypes.byref(struct), ctypes.byref(expert_kernels(dtype)), c_void_p(address(router_input)),
        c_void_p(h.data_ptr()), c_void_p(address(add)),
        c_void_p(address(add_gate)), c_void_p(out.data_ptr()), c_long(t), c_void_p(scratch.data_ptr()),
        c_int(torch.get_num_threads()),
    ):  # fmt: skip
        raise MemoryError("no memory for the buffers of a matmul")
    return out


def choose(logits: Tensor, layer: CExperts) -> tuple[Tensor, Tensor]:
    """Chooses each row's experts as `experts` does, by logits [T, E] float32. Returns the experts [T, chosen] int32 and
    their weights [T, chosen] float32."""
    parts = layer.router.k // layer.down.n  # other processes may hold the other rows of gate_up and down, not read here
    found, struct, shape = library(), layer.struct(parts=parts), (len(logits), layer.chosen)
    assert found is not None and logits.shape[1] == layer.router.n
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    numbers, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    found.experts_choose(
        ctypes.byref(struct), c_void_p(logits.data_ptr()), c_long(len(logits)), c_void_p(numbers.data_ptr()),
        c_void_p(weights.data_ptr()),
    )  # fmt: skip
    return numbers, weights


def combine(
    results: Tensor, weights: Tensor, add: Tensor | None, add_gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums the results of each row's experts, [T, chosen, H] float32, as `experts` does. Returns [T, H] in `dtype`.

    weights [T, chosen]; add [T, H] in `dtype`, add_gate [T, 1] float32: as for `experts_torch`
    """
    (t, chosen, hidden), out = results.shape, results.new_empty(results.shape[::2], dtype=dtype)
    assert results.is_contiguous() and weights.is_contiguous() and weights.shape == (t, chosen)
    assert add is None or (add.dtype == dtype and add.is_contiguous() and add.shape == out.shape)
    assert add_gate is None or (add_gate.numel() == t and add_gate.is_contiguous())
    places = torch.arange(t * chosen, dtype=torch.int32)
    kernels()[dtype].combine(
        results.data_ptr(), places.data_ptr(), weights.data_ptr(), address(add), address(add_gate), out.data_ptr(),
        t, chosen, hidden, torch.get_num_threads(),
    )  # fmt: skip
    return out


def linear_per_head(x: Tensor, packed: CpuExperts) -> Tensor:
    """Computes the same as linear_per_head_torch.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    (t, heads, k), n, size = x.shape, packed.n, x.element_size()
    assert heads == packed.count and k == packed.k and x.dtype == packed.dtype
    by_head, out = x.transpose(0, 1).contiguous(), torch.empty(heads, t, n, dtype=x.dtype)
    jobs = (GemmJob * heads)()
    for h, job in enumerate(jobs):
        job.weights, job.t = addressof(packed.structs[h]), t
        job.x, job.out = by_head.data_ptr() + h * t * k * size, out.data_ptr() + h * t * n * size
    if kernels()[x.dtype].gemm(addressof(jobs), heads, x.dtype == torch.bfloat16, torch.get_num_threads()):
        raise MemoryError("no memory for the buffers of a matmul")
    return out.transpose(0, 1).contiguous()

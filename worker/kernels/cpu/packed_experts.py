"""Packs one linear of all experts of a layer (gate_up or down) into a few pieces of memory.

The weight of an expert is packed like any other weight (packed_weight.py).
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from ctypes import POINTER, addressof, cast, sizeof
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu.huge_pages import ALIGNMENT, fresh_memory
from worker.kernels.cpu.packed_weight import NUMBERS, TENSORS, WeightStruct, pack_weight
from worker.kernels.weights.quantized_weight import QuantizedWeight

# a struct as numbers: its NUMBERS, the places of its TENSORS (see CpuExperts.records), and the next struct's index
Record = list[int | float | None]


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The packed weight [n, k] of one expert."""

    struct: WeightStruct
    n: int
    k: int
    dtype: torch.dtype


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
        # zeros make the pieces of equal weights equal, gaps included
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
    experts: Iterable[Sequence[Tensor | QuantizedWeight]], bias: Tensor | None, *, count: int, dtype: torch.dtype
) -> CpuExperts:
    """Packs the weights of `count` experts. experts: for each expert the parts of its weight [N, K], as in pack_weight

    bias: [count, N]
    """
    arena, first, others = Arena(count), list[WeightStruct](), list[WeightStruct]()
    following: list[tuple[int, int]] = []  # (index of a struct, index of the struct to which it points)
    for number, parts in enumerate(experts):
        weight = pack_weight(parts, None if bias is None else bias[number], dtype=dtype, memory=arena.take)
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

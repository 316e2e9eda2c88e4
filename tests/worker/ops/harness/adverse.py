"""Finds errors that Triton's interpreter hides, because it runs programs one after another, in order, and lets them
read whatever lies beside a tensor.

Here programs run in another order. Every tensor is moved to memory of its own, and each access must be to an element of
a tensor. No element may be both loaded and stored in one launch, nor stored twice: on a GPU, nothing orders the
accesses of the programs of a launch, nor of the threads of a program. Atomics are ordered among themselves. A barrier
orders the accesses of its own program before and after it. Accesses of a program before a barrier and an atomic come
before the accesses of another program after a later atomic.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Order = Literal["backwards", "shuffled"]
GAP = 1 << 14  # unused bytes on either side of a tensor
LARGE = 1 << 28  # bytes; a larger tensor is not moved
LOADED, STORED, ATOMIC = 1, 2, 4
# kind of access → earlier kinds that it must not follow
FORBIDDEN = {LOADED: STORED | ATOMIC, STORED: LOADED | STORED | ATOMIC, ATOMIC: LOADED | STORED}
NAMES = {LOADED: "loaded", STORED: "stored", ATOMIC: "changed atomically"}


class Fault(Exception):
    """A kernel made an access that is an error on a GPU."""


class Area:
    """A tensor in memory of its own, and the accesses of a launch to each element so far."""

    def __init__(self, given: Tensor, *, movable: bool = True) -> None:
        self._given = _distinct(given)
        shape, strides = self._given.shape, self._given.stride()
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        self.size = given.element_size()
        if span * self.size > LARGE or not movable:
            self.moved, self._copy = given, None
        else:
            place = torch.full((span * self.size + 2 * GAP,), 0xFF, dtype=torch.uint8)  # NaN
            whole = place[GAP : GAP + span * self.size].view(given.dtype)
            self._copy = whole.as_strided(shape, strides)
            self._copy.copy_(self._given)
            self.moved = whole.as_strided(given.shape, given.stride())
        self.begin = self.moved.data_ptr()
        self._done = np.zeros(span, np.uint8)
        self._released = np.zeros(span, np.uint8)  # accesses before a barrier and then an atomic
        self._acquired = False  # whether this program has made an atomic after the released accesses
        # recent accesses: (indices, states of the elements before the access, kind of access)
        self._recent: list[tuple[NDArray[np.int64], NDArray[np.uint8], int]] = []
        self._ordered: list[tuple[NDArray[np.int64], int]] = []  # (indices, kind) of accesses before a barrier
        self._own: NDArray[np.bool_] | None = None
        if self._given.numel() < span and self._copy is not None:
            own = torch.zeros(span, dtype=torch.bool)
            own.as_strided(shape, strides).fill_(True)
            self._own = own.numpy()

    def access(self, offsets: NDArray[np.int64], how: int) -> None:
        """Records an access to bytes. Raises Fault if they are not the tensor's, or two accesses are not ordered."""
        at, rest = np.divmod(offsets, self.size)
        if rest.any() or at.min() < 0 or at.max() >= len(self._done) or not self._owns(at):
            raise Fault(f"outside of the {tuple(self.moved.shape)} {self.moved.dtype} nearest to it is {NAMES[how]}")
        twice = how == STORED and len(np.unique(at)) < len(at)
        before = self._done[at]
        others = before if self._acquired else before | self._released[at]
        if twice or (others & FORBIDDEN[how]).any():
            raise Fault(f"what else is done to it is not ordered: {NAMES[how]} is {tuple(self.moved.shape)}")
        self._done[at] = before | how
        self._recent.append((at, before, how))

    def barrier(self) -> None:
        """Lets this program access again what it accessed before the barrier. Other programs still must not."""
        for at, before, how in reversed(self._recent):
            self._done[at] = before
            self._ordered.append((at, how))
        self._recent.clear()

    def synchronize(self) -> None:
        """Records an atomic: it releases this program's accesses before a barrier, and acquires other programs'."""
        for at, how in self._ordered:
            self._released[at] |= how
        self._ordered.clear()
        self._acquired = True

    def end_program(self) -> None:
        self._acquired = False
        for at, how in self._ordered:
            self._done[at] |= how
        self._recent.clear()
        self._ordered.clear()

    def _owns(self, at: NDArray[np.int64]) -> bool:
        return self._own is None or bool(self._own[at].all())

    def give_back(self) -> None:
        if self._copy is not None and ((self._done | self._released) & (STORED | ATOMIC)).any():
            self._given.copy_(self._copy)


class Launch:
    """One launch of a kernel: its tensors, and the order of its programs.

    reached: tensors that the kernel finds by addresses in a table. They are not moved.
    """

    def __init__(self, order: Order, reached: Sequence[Tensor]) -> None:
        self._order = order
        self._areas: dict[tuple[object, ...], Area] = {
            ("reached", tensor.data_ptr()): Area(tensor, movable=False) for tensor in reached
        }
        self._programs: list[tuple[int, int, int]] = []
        self._dim = (1, 1, 1)
        self._begins = np.empty(0, np.uint64)

    def move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        return self._areas.setdefault(key, Area(value)).moved if value.numel() else value

    def begin(self, grid: tuple[int, int, int]) -> None:
        self._areas = dict(sorted(self._areas.items(), key=lambda item: item[1].begin))
        self._begins = np.array([area.begin for area in self._areas.values()], np.uint64)
        self._dim = grid
        self._programs = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        if self._order == "backwards":
            self._programs.reverse()
        else:
            random.Random(len(self._programs)).shuffle(self._programs)

    def instead(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """Returns the program that runs when the interpreter would run (x, y, z)."""
        for area in self._areas.values():
            area.end_program()
        return self._programs[(x * self._dim[1] + y) * self._dim[2] + z]

    def access(self, pointers: Any, mask: Any, how: int) -> None:
        where, lanes = np.broadcast_arrays(pointers.data, mask.data)
        addresses = where[lanes.astype(bool)]
        areas, nearest = list(self._areas.values()), np.searchsorted(self._begins, addresses, "right") - 1
        for index in np.unique(nearest):
            area = areas[max(0, int(index))]
            area.access(addresses[nearest == index].astype(np.int64) - area.begin, how)
        if how == ATOMIC:
            for area in areas:
                area.synchronize()

    def barrier(self) -> None:
        for area in self._areas.values():
            area.barrier()

    def end(self) -> None:
        for area in self._areas.values():
            area.end_program()
            area.give_back()


def _distinct(given: Tensor) -> Tensor:
    """Returns a view without the dimensions along which an expanded tensor repeats its elements."""
    shape = [1 if stride == 0 else n for n, stride in zip(given.shape, given.stride(), strict=True)]
    return given.as_strided(shape, given.stride())


@contextmanager
def adverse(order: Order, reached: Sequence[Tensor] = ()) -> Iterator[set[str]]:
    """Checks every launch inside the `with`, and yields the names of launched kernels. Triton wraps a Fault in its
    InterpreterError. reached: see Launch; the caller may extend a list before the launch"""
    from triton.runtime import interpreter

    builder, launched, current = interpreter.InterpreterBuilder, set[str](), [Launch(order, reached)]

    def watch(name: str, how: int, pointer: int, mask: int) -> None:
        plain: Callable[..., Any] = getattr(builder, name)

        def watched(self: Any, *given: Any) -> Any:
            current[0].access(given[pointer], given[mask], how)
            return plain(self, *given)

        stack.enter_context(patch.object(builder, name, watched))

    def move(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        current[0] = Launch(order, reached)
        launched.add(self.fn.__name__)
        return [current[0].move(arg) for arg in args], {name: current[0].move(arg) for name, arg in kwargs.items()}

    def begin(self: Any, *grid: int) -> None:
        set_dim(self, *grid)
        current[0].begin(grid)  # type: ignore[arg-type]

    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    with ExitStack() as stack:
        watch("create_masked_load", LOADED, 0, 1)
        watch("create_masked_store", STORED, 0, 2)
        watch("create_atomic_rmw", ATOMIC, 1, 3)
        for owner, name, instead in (
            (interpreter.GridExecutor, "_init_args_hst", move),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: current[0].end()),
            (builder, "set_grid_dim", begin),
            (builder, "create_barrier", lambda _: current[0].barrier()),
            (builder, "set_grid_idx", lambda self, *at: set_index(self, *current[0].instead(*at))),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        yield launched

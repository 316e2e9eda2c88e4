"""Byte ranges of files into tensors: threads read ahead into staging buffers, which are copied to the device meanwhile.

Knows files and bytes, no names. A buffer is read into again only when the device has its bytes; on CUDA buffers are
pinned, so that a copy needs nobody's time.

    file ──preadv──► buffer 1 ──copy──► tensor         several threads read, each a piece into a buffer;
         ──preadv──► buffer 2                          the caller's thread copies, in the order in which it is asked
         ──preadv──► buffer 3

`expect` says what will be asked for, in what order. What is asked for in another order is right all the same, but
nobody has read ahead of it.
"""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 4 << 20  # bytes of a buffer: what a piece costs besides its bytes does not show, and all fit into a cache
BUFFERS = 8  # as many reads at a time: a fast disk is idle with fewer


@dataclass(frozen=True, slots=True)
class Extent:
    """So many bytes of an open file, from `offset` on."""

    fd: int
    offset: int
    nbytes: int


class Buffer:
    """Staging memory, and the copy out of it that has to end before it is written again."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._memory.numpy().data
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fill(self, extent: Extent) -> None:
        """Raises OSError, and EOFError when the file ends before the extent does."""
        self.settle()
        done = 0
        while done < extent.nbytes:
            read = os.preadv(extent.fd, [self._bytes[done : extent.nbytes]], extent.offset + done)
            if not read:
                raise EOFError("it ends early")
            done += read

    def copy(self, stored: torch.dtype, into: Tensor) -> None:
        """Its first bytes, numbers of format `stored`, into a flat, contiguous tensor; other formats are made of
        them on that tensor's device. A GPU may not be through yet when this returns."""
        memory = self._memory[: into.numel() * stored.itemsize]
        if into.dtype == stored:
            into.view(torch.uint8).copy_(memory, non_blocking=True)
        else:
            into.copy_(memory.to(into.device, non_blocking=True).view(stored))
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> None:
        """Wait for the last copy."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece on its way into a buffer."""

    piece: Extent
    buffer: Buffer
    done: Future[None]


class Staging:
    """One load's buffers and threads."""

    def __init__(self, device: torch.device, *, piece: int = PIECE, buffers: int = BUFFERS) -> None:
        """`piece` in bytes, a multiple of 8, so that no number is cut."""
        self._piece = piece
        self._free = [Buffer(piece, device) for _ in range(buffers)]
        self._pool = ThreadPoolExecutor(buffers, "weights")
        self._expected: deque[Extent] = deque()  # pieces that nobody reads yet, in order
        self._ahead: deque[_Read] = deque()

    def expect(self, extents: Iterable[Extent]) -> None:
        """What will be asked for next, from the first on."""
        self._expected.extend(piece for extent in extents for piece in self._pieces(extent))
        self._read_ahead()

    def copy(self, extent: Extent, stored: torch.dtype, into: Tensor) -> None:
        """Fill `into`, contiguous, of any device and format, with the extent's numbers of format `stored`.

        Does not wait for a GPU: what is launched there afterwards sees the numbers. Raises OSError, and EOFError when
        the file is shorter than that.
        """
        flat, at, pieces = into.view(-1), 0, self._pieces(extent)
        if pieces and not (self._ahead and self._ahead[0].piece == pieces[0]):
            self._bring_forward(pieces)
        for piece in pieces:
            read = self._ahead.popleft()
            read.done.result()
            count = piece.nbytes // stored.itemsize
            read.buffer.copy(stored, flat[at : at + count])
            at += count
            self._free.append(read.buffer)
            self._read_ahead()

    def close(self) -> None:
        """Wait for all reads and copies, and end the threads."""
        self._pool.shutdown(cancel_futures=True)
        for buffer in (*self._free, *(read.buffer for read in self._ahead)):
            buffer.settle()

    def _pieces(self, extent: Extent) -> list[Extent]:
        begins = range(extent.offset, extent.offset + extent.nbytes, self._piece)
        return [Extent(extent.fd, begin, min(self._piece, begins.stop - begin)) for begin in begins]

    def _read_ahead(self) -> None:
        while self._free and self._expected:
            piece, buffer = self._expected.popleft(), self._free.pop(0)
            self._ahead.append(_Read(piece, buffer, self._pool.submit(buffer.fill, piece)))

    def _bring_forward(self, pieces: list[Extent]) -> None:
        """They were not expected next; what was read ahead instead is read again when its turn comes."""
        wait([read.done for read in self._ahead])
        later = [*(read.piece for read in self._ahead), *self._expected]
        self._free += [read.buffer for read in self._ahead]
        self._ahead.clear()
        now = set(pieces)
        self._expected = deque([*pieces, *(piece for piece in later if piece not in now)])
        self._read_ahead()

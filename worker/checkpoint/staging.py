"""Loads byte ranges of files into tensors. Threads read ahead into staging buffers while filled buffers are copied.

The module works on files and bytes, and knows no tensor names. A buffer is reused only after its bytes are on the
device. With CUDA, the buffers are pinned, so that copies are asynchronous.

    file ──preadv──► buffer 1 ──copy──► tensor         several threads read, one piece into one buffer;
         ──preadv──► buffer 2                          the caller's thread copies, in the order of its calls
         ──preadv──► buffer 3

`expect` announces the order of the copies. Copies in another order are correct as well, but are not read ahead.
"""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE_BYTES = 4 << 20  # size of a buffer: the overhead per piece is small, and all buffers fit into the CPU's cache
BUFFERS = 8  # also the number of concurrent reads; with fewer reads, a fast disk would be idle at times


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of an open file."""

    fd: int
    offset: int
    nbytes: int

    def parts(self, count: int) -> list["Extent"]:
        """Cuts the range into `count` ranges of the same size."""
        size = self.nbytes // max(count, 1)
        return [Extent(self.fd, self.offset + at * size, size) for at in range(count)]


class Buffer:
    """Staging memory for copies to the device. A CUDA event tells when the last copy from the buffer has ended; the
    buffer may then be reused.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._memory.numpy().data
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fill(self, extent: Extent) -> None:
        """Reads the extent into the buffer. Raises OSError, and EOFError when the file ends before the extent does."""
        self.wait()
        done = 0
        while done < extent.nbytes:
            read = os.preadv(extent.fd, [self._bytes[done : extent.nbytes]], extent.offset + done)
            if not read:
                raise EOFError("the file ends early")
            done += read

    def copy(self, stored: torch.dtype, into: Tensor) -> None:
        """Fills a flat, contiguous tensor with the numbers at the start of the buffer. stored: the dtype of the numbers
        in the buffer

        A conversion to another dtype runs on the tensor's device. A copy to a GPU may end after this method returns.
        """
        memory = self._memory[: into.numel() * stored.itemsize]
        if into.dtype == stored:
            into.view(torch.uint8).copy_(memory, non_blocking=True)
        else:
            into.copy_(memory.to(into.device, non_blocking=True).view(stored))
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Waits until the last copy from the buffer has ended."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True, slots=True)
class _Read:
    """A running or finished read of a piece of a file into a buffer."""

    piece: Extent
    buffer: Buffer
    done: Future[None]


class Staging:
    """Loads extents with its own buffers and threads. Each load of a model needs an object of its own."""

    def __init__(self, device: torch.device, *, piece: int = PIECE_BYTES, buffers: int = BUFFERS) -> None:
        """piece: size of a buffer in bytes, a multiple of 8, so that no number is split; buffers: how many buffers
        there are
        """
        self._piece = piece
        self._free = [Buffer(piece, device) for _ in range(buffers)]
        self._pool = ThreadPoolExecutor(buffers, "weights")
        self._expected: deque[Extent] = deque()  # pieces whose read has not started, in order
        self._ahead: deque[_Read] = deque()

    def expect(self, extents: Iterable[Extent]) -> None:
        """Announces the extents that copy() will be called with next, in this order."""
        self._expected.extend(piece for extent in extents for piece in self._pieces(extent))
        self._read_ahead()

    def copy(self, extent: Extent, stored: torch.dtype, into: Tensor) -> None:
        """Fills `into` with the numbers of an extent.

        stored: dtype of the numbers in the file
        into: a contiguous tensor on any device and of any dtype

        Does not wait for a GPU, but kernels launched later see the numbers. Raises OSError, and EOFError when the file
        is shorter than the extent.
        """
        flat, at, pieces = into.view(-1), 0, self._pieces(extent)
        if pieces and not (self._ahead and self._ahead[0].piece == pieces[0]):
            self._read_now(pieces)
        for piece in pieces:
            read = self._ahead.popleft()
            read.done.result()
            count = piece.nbytes // stored.itemsize
            read.buffer.copy(stored, flat[at : at + count])
            at += count
            self._free.append(read.buffer)
            self._read_ahead()

    def close(self) -> None:
        """Waits for all reads and copies, and ends the threads."""
        self._pool.shutdown(cancel_futures=True)
        for buffer in (*self._free, *(read.buffer for read in self._ahead)):
            buffer.wait()

    def _pieces(self, extent: Extent) -> list[Extent]:
        begins = range(extent.offset, extent.offset + extent.nbytes, self._piece)
        return [Extent(extent.fd, begin, min(self._piece, begins.stop - begin)) for begin in begins]

    def _read_ahead(self) -> None:
        while self._free and self._expected:
            piece, buffer = self._expected.popleft(), self._free.pop(0)
            self._ahead.append(_Read(piece, buffer, self._pool.submit(buffer.fill, piece)))

    def _read_now(self, pieces: list[Extent]) -> None:
        """Starts to read pieces that were not expected next. Discards pieces read ahead; they are read again later."""
        wait([read.done for read in self._ahead])
        later = [*(read.piece for read in self._ahead), *self._expected]
        self._free += [read.buffer for read in self._ahead]
        self._ahead.clear()
        now = set(pieces)
        self._expected = deque([*pieces, *(piece for piece in later if piece not in now)])
        self._read_ahead()

"""Converts a large tensor in slices of rows; on the CPU several at once, each by one thread.

A slice's thread runs every operation alone, because a conversion consists of many short operations, at whose ends
threads would wait for each other: longest when other processes use the cores, too. Slices are so large because the
threads also wait for Python's lock between operations, and not larger because their temporaries leave the caches.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

CPU_NUMBERS, GPU_NUMBERS = 1 << 20, 1 << 22  # numbers of a slice; on a GPU more, as each operation is a launch
FEW = 2  # slices that are converted sooner than threads begin


def by_rows(rows: int, columns: int, convert: Callable[[slice], None], *, on_gpu: bool) -> None:
    """Calls convert(slice) for slices that cover all rows. The slices must not depend on each other."""
    size = max(1, (GPU_NUMBERS if on_gpu else CPU_NUMBERS) // columns)
    slices, own = [slice(begin, begin + size) for begin in range(0, rows, size)], torch.get_num_threads()
    if on_gpu or own == 1 or torch.is_inference_mode_enabled():  # the mode belongs to one thread
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
                pass  # re-raises the exception of a slice
    finally:
        torch.set_num_threads(own)  # the number is also the default of threads that begin later

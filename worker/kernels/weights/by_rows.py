"""Converts a large tensor in slices of rows. On the CPU, threads convert several slices at once, one thread per slice.

A conversion consists of many short operations. If several threads shared each operation, they would wait for each
other at its end, and longer if other processes use the cores. So one thread runs all operations of a slice. With larger
slices, threads wait less often for Python's GIL. With smaller slices, the temporaries stay in the caches.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

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

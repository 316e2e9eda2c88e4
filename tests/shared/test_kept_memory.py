"""Freed memory stays in the process while a model is loaded, and goes back to the system afterwards."""

import mmap
import resource
from pathlib import Path

import torch

from shared.allocator import kept_free_memory

NBYTES = 64 << 20


def load_linear() -> int:
    """Fills and frees the temporaries of a linear; returns the page faults."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [torch.ones(NBYTES, dtype=torch.uint8) for _ in range(3)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_linears_reuse_memory_until_the_end() -> None:
    pages, before = 3 * NBYTES // mmap.PAGESIZE, resident()
    with kept_free_memory():
        faults = [load_linear() for _ in range(8)]
        assert sum(faults) < 4 * pages, "some are moved to where nothing was, as they must be aligned"
        assert resident() > before + NBYTES
    assert resident() < before + NBYTES
    assert load_linear() > pages // 2, "large tensors are mappings of their own again"

"""Compiles for a real GPU's instructions what a rehearsal found to be needed."""

import time
from collections.abc import Iterable

from tests.worker.gpu.launches import SHARED, Compilation
from tests.worker.kernels.offline import usage

SPILLED = 32  # bytes a thread that do not matter


def compile_all(compilations: Iterable[Compilation]) -> list[str]:
    """Says what each takes; which have more shared memory than a program may, or spill more than a few."""
    problems = []
    for one in compilations:
        begun = time.process_time()
        used = usage(one.compiled())
        print(f"{one.kernel.__name__} {time.process_time() - begun:.1f} s {used}", flush=True)
        if used.shared > SHARED or used.stack > SPILLED:
            problems.append(f"{used} {one.key}")
    return problems

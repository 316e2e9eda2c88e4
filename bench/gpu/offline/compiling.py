"""Compiles, for a real GPU and on all cores, what a run on the fake GPU found to be needed.

Triton keeps what was compiled in its cache, so the first start or bench on a machine with such a GPU is short.
"""

import os
import time
from collections.abc import Iterable
from multiprocessing import get_context
from typing import Any

from bench.gpu.offline.launches import SHARED, Compilation
from bench.gpu.offline.triton_offline import usage

SPILLED = 32  # bytes a thread that do not matter


def compile_all(compilations: Iterable[Compilation]) -> list[str]:
    """Says what each takes; which fail, have more shared memory than a program may, or spill more than a few."""
    context, todo = get_context("fork"), list(compilations)  # kernels cannot be sent to another process
    cores = len(os.sched_getaffinity(0))
    said: Any = context.SimpleQueue()
    processes = [context.Process(target=_compile, args=(todo[first::cores], said)) for first in range(cores)]
    for process in processes:
        process.start()
    told = [said.get() for _ in todo]
    for process in processes:
        process.join()
    return [problem for problem in told if problem]


def _compile(compilations: list[Compilation], said: Any) -> None:
    for one in compilations:
        said.put(_problem(one))


def _problem(one: Compilation) -> str:
    begun = time.monotonic()
    try:
        used = usage(one.compiled())
    except Exception as error:
        return f"{type(error).__name__}: {error}: {one.key}"
    print(f"{one.kernel.__name__} {time.monotonic() - begun:.1f} s {used}", flush=True)
    return f"{used} {one.key}" if used.shared > SHARED or used.stack > SPILLED else ""

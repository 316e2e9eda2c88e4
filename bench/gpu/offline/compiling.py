"""Compiles the kernels that a run on the fake GPU needed, for a real GPU and on all cores.

Triton caches the compiled code, so the first start or bench on a machine with this kind of GPU is short.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from bench.gpu.offline.devices import DEVICES
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.triton_offline import Usage, tensor_core_kinds, usage

SPILLED = 32  # bytes of registers that each thread may spill


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel, or the compiler's error.

    key: the kernel's name and constants. seconds: compile time. kinds: kinds of tensor-core instructions in the code.
    """

    kernel: str
    key: str
    capability: int
    seconds: float
    cached_s: float = 0.0  # seconds to load it from Triton's cache
    used: Usage | None = None
    kinds: tuple[str, ...] = ()
    error: str = ""

    @property
    def problem(self) -> str:
        """The reason why the GPU cannot run the kernel, or would run it slowly; empty if there is none."""
        if self.used is None:
            return f"sm_{self.capability}: {self.error}: {self.key}"
        most = DEVICES[self.capability].shared
        if self.used.shared > most:
            return f"sm_{self.capability}: {self.used.shared} bytes of shared memory, {most} are there: {self.key}"
        spilled = self.used.stack > SPILLED
        return f"sm_{self.capability}: {self.used.stack} bytes a thread are spilled: {self.key}" if spilled else ""


def compile_all(compilations: Iterable[Compilation]) -> list[str]:
    """Compiles all kernels, and prints each kernel's compile time and memory. Returns the problems found."""
    binaries = binaries_of(compilations)
    for one in binaries:
        print(f"{one.kernel} {one.seconds:.1f} s {one.used}", flush=True)
    return [one.problem for one in binaries if one.problem]


def binaries_of(compilations: Iterable[Compilation]) -> list[Binary]:
    """Compiles on all cores, with a process per core; a free process takes the next kernel."""
    context, todo = get_context("fork"), list(compilations)  # fork, because kernels cannot be pickled
    cores = len(os.sched_getaffinity(0))
    finished: Any = context.SimpleQueue()
    taken: Any = context.Value("i", 0)
    processes = [context.Process(target=_compile, args=(todo, taken, finished)) for _ in range(cores)]
    for process in processes:
        process.start()
    binaries = [finished.get() for _ in todo]
    for process in processes:
        process.join()
    return binaries


def _compile(compilations: list[Compilation], taken: Any, finished: Any) -> None:
    while True:
        with taken.get_lock():
            at, taken.value = taken.value, taken.value + 1
        if at >= len(compilations):
            return
        finished.put(_binary(compilations[at]))


def _binary(one: Compilation) -> Binary:
    name, begun = one.kernel.__name__, time.monotonic()
    try:
        compiled = one.compiled()
        seconds = time.monotonic() - begun
        again = time.monotonic()
        one.compiled()
        cached_s = time.monotonic() - again
        kinds = tuple(sorted(tensor_core_kinds(compiled)))
        return Binary(name, one.key, one.capability, seconds, cached_s, usage(compiled), kinds)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Binary(name, one.key, one.capability, time.monotonic() - begun, error=message)

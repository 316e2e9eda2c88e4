"""Reports the seconds that Triton spends compiling. These seconds count neither as measured time nor towards a time
limit.

At its first launch, a kernel is compiled in about a second, and its launcher is built with the C compiler.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

CACHED_S = 0.02  # if a compilation takes less, the code was found in Triton's cache


def watch_compilations(report: Callable[[float], None]) -> None:
    """From now on, calls `report` with the seconds of each compilation in this process. Does nothing without Triton."""
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    # These methods are not part of Triton's public interface. If one is missing, its time is not reported.
    for owner, method in ((JITFunction, "_do_compile"), (CompiledKernel, "_init_handles")):
        if hasattr(owner, method):
            setattr(owner, method, _timed(getattr(owner, method), report))


def _timed(call: Callable[..., Any], report: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            if (seconds := time.monotonic() - begun) >= CACHED_S:
                report(seconds)

    return timed

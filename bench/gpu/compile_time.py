"""Seconds that Triton spends compiling, so that they are reported and count neither as measurements nor as hanging.

A kernel is compiled at its first launch, which takes about a second, and its launcher is built with the C compiler.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

CACHED_S = 0.02  # a compilation that takes less was found in Triton's cache


def watch_compilations(report: Callable[[float], None]) -> None:
    """Calls `report` with the seconds of each compilation in this process from now on, if it has Triton."""
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    # Neither method is part of Triton's interface; without them nothing is reported, and all else works.
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

"""How the cost of a piece of work grows with its size, whatever the speed of the machine."""

import gc
import time
from collections.abc import Callable
from typing import Any


def growth(prepared: Callable[[int], Callable[[], Any]], size: int, *, times: int = 8) -> float:
    """Returns by how much more processor time `prepared(times * size)()` takes than `prepared(size)()`.

    Linear work gives about `times`, and quadratic work its square. Only the calling thread's own time counts, and of
    three runs the shortest one, so neither other processes nor the machine's speed change the figure.
    """

    def seconds(count: int) -> float:
        taken = []
        for _ in range(3):
            work = prepared(count)
            gc.collect()
            begun = time.thread_time_ns()
            work()
            taken.append(time.thread_time_ns() - begun)
        return max(min(taken), 1) / 1e9

    return seconds(times * size) / seconds(size)

"""Computes masks that take long in a thread of its own, so that the steps of other tenants do not wait for them.

A mask of a hostile grammar takes a hundred milliseconds, and no part of a mask can be computed alone. The scheduler
therefore asks for such a mask as soon as the token before it is known, and plans the row when the mask is there. The
thread has a low priority, because the forward needs the cores. Tenants take turns. A mask depends on the output alone,
so it is the same here and in a step.
"""

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.machine import lower_own_priority
from shared.sandbox import TurnQueue

NICENESS = 10  # gives the thread a tenth of a core while two other threads are busy
Bits = NDArray[np.uint8]  # one row: one bit per token, the lowest bit of a byte first; 1: the token is allowed


class State(Protocol):
    """A state in a grammar: llguidance's LLMatcher."""

    def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None: ...


class Mask(Future[tuple[Bits, float]]):
    """The allowed tokens, and how many seconds of processor time they took."""


class MasksAhead:
    """The thread. wake: called in it after each mask"""

    def __init__(self, vocab_size: int, wake: Callable[[], None]) -> None:
        self._nbytes = mask_bytes(vocab_size)
        self._wake = wake
        self._turns = TurnQueue(1)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="masks", initializer=lower_own_priority, initargs=(NICENESS,)
        )

    def begin(self, state: State, owner: object, tenant: str) -> Mask:
        """Begins to compute a mask. The state may not be used elsewhere meanwhile. The work is dropped with its owner.

        To compute the mask in a step instead, cancel it, which succeeds before its turn.
        """
        mask, alive = Mask(), weakref.ref(owner)
        held = [state]

        def compute() -> None:
            state = held.pop()
            try:
                if alive() is not None and mask.set_running_or_notify_cancel():
                    mask.set_result(computed(state, self._nbytes))
            except BaseException as error:  # a panic in Rust is a BaseException, but not an Exception
                mask.set_exception(error)
            finally:
                self._turns.leave(tenant)
                self._wake()

        def start() -> None:
            try:
                self._thread.submit(compute)
            except RuntimeError:  # the thread was shut down
                mask.cancel()

        self._turns.enter(tenant, start)
        return mask

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def mask_bytes(vocab_size: int) -> int:
    """Returns the bytes of a mask: whole words of 32 tokens."""
    return (vocab_size + 31) // 32 * 4


def computed(state: State, nbytes: int) -> tuple[Bits, float]:
    """Returns the mask of a state, and the processor time that it took, in seconds."""
    bits, began = np.zeros(nbytes, np.uint8), time.thread_time()
    state.unsafe_compute_mask_ptr(bits.ctypes.data, nbytes)
    return bits, time.thread_time() - began

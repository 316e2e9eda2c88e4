"""The base class of drafters that run a model: it sizes their K/V cache, and an error in a drafter ends no request."""

import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Seq

import torch

from worker.kv_cache.groups import one_group
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import bytes_per_page
from worker.schedule.sequence import TILE, Sequence
from worker.spec import ModelSpec

log = logging.getLogger("sluice.drafts")

PAGE_SIZE = 16  # tokens


class CpuDrafter(ABC):
    """Proposes tokens with a model. After the model has failed once, it proposes nothing any more."""

    name: str  # the name of the model in the log
    failed = False
    seconds = 0.0  # the duration of the last propose()

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns drafts for each sequence, () for none. wanted: (sequence, maximum number of drafts) pairs."""
        nothing: list[tuple[int, ...]] = [()] * len(wanted)
        if self.failed:
            return nothing
        begun = time.perf_counter()
        try:
            return self._propose(wanted)
        except Exception:
            log.exception("%s failed, and drafts no more", self.name)
            self.failed = True
            return nothing
        finally:
            self.seconds = time.perf_counter() - begun

    @abstractmethod
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Computes the result of `propose`. May raise any exception."""


def page_count(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int) -> int:
    """Returns how many pages a drafter's pool has: as many as fit in `pool_bytes`, but enough for one sequence.

    A sequence has up to `longest` tokens. The pool has no more pages than TILE sequences need. One page is the scratch
    page.
    """
    each = -(-longest // PAGE_SIZE)
    affordable = pool_bytes // max(1, bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, "cpu"))
    return 1 + max(each, min(TILE * each, affordable))


def cache_bytes(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int) -> int:
    """Returns how many bytes the K/V of a drafter takes. For the arguments, see page_count."""
    each = bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, "cpu")
    return page_count(spec, dtype, longest, pool_bytes) * each


def grow(pages: "array[int]", pool: PagePool, tokens: int) -> bool:
    """Adds pages until `tokens` tokens have slots. Returns False and changes nothing if the pool has too few pages."""
    more = pool.acquire(max(0, pool.pages_for(tokens) - len(pages)))
    pages.extend(more or ())
    return more is not None

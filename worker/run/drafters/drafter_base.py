"""What drafters that run a model have in common: the size of their cache, and that an error ends no request."""

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
    """Proposes tokens with a model. It never does so again after the model has failed once."""

    name: str  # of the model, in the log
    failed = False
    seconds = 0.0  # what the last proposals took

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns for each sequence at most so many tokens that may follow its tokens; none where it cannot draft."""
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
        """Does what `propose` says. May raise anything."""


def page_count(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int) -> int:
    """Returns how many pages a drafter's pool has: at most `pool_bytes`, but enough for a sequence of `longest` tokens.

    It needs no more than a step of TILE sequences of this length. One page is the scratch page.
    """
    each = -(-longest // PAGE_SIZE)
    affordable = pool_bytes // max(1, bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, "cpu"))
    return 1 + max(each, min(TILE * each, affordable))


def cache_bytes(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int) -> int:
    """Returns how many bytes the K/V of a drafter takes. The arguments are those of page_count."""
    each = bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, "cpu")
    return page_count(spec, dtype, longest, pool_bytes) * each


def grow(pages: "array[int]", pool: PagePool, tokens: int) -> bool:
    """Adds the pages that so many tokens need. Returns False and changes nothing if there are too few."""
    more = pool.acquire(max(0, pool.pages_for(tokens) - len(pages)))
    pages.extend(more or ())
    return more is not None

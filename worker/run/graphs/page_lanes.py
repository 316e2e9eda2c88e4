"""Keeps the page tables of running sequences on the device, and sends only the pages that are new.

Each running sequence has a lane: a row of the page tables. A step names the lanes of its sequences, and the device
gathers the step's page tables from these rows. When sequences come and go, no other pages have to be sent again.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from worker.run.inputs import to_device
from worker.schedule.sequence import Chunk


@dataclass(slots=True, eq=False)
class _Lane:
    number: int
    pages: "list[array[int]]"  # `pages` of the sequence; a new list object means that the sequence got new pages
    count: int = 0  # how many pages of each group are on the device


class PageLanes:
    """The lanes of up to `lanes` sequences with up to `pages` pages in each of `groups` groups of layers.

    tables: for each group [lanes + 1, pages] int32. The last row, `scratch`, consists of the scratch page.
    """

    def __init__(self, lanes: int, pages: int, groups: int, device: torch.device) -> None:
        self.tables = tuple(torch.zeros(lanes + 1, pages, dtype=torch.int32, device=device) for _ in range(groups))
        self.scratch = lanes
        self._pages, self._device = pages, device
        self._lanes: dict[int, _Lane] = {}  # id() of a sequence's `pages` → its lane
        self._free = list(reversed(range(lanes)))

    def lanes_of(self, chunks: Seq[Chunk], page_size: int) -> list[int]:
        """Returns the lanes of the chunks' sequences. Sends the pages of the chunks that are not on the device yet.

        Steps that are launched later in the stream see the new pages. Pages that a sequence has returned stay in the
        tables, because no row reads them.
        """
        numbers, missing = [], []
        for chunk in chunks:
            pages = chunk.sequence.pages
            lane = self._lanes.get(id(pages)) or self._new_lane(pages, chunks)
            needed = (chunk.start + chunk.length - 1) // page_size + 1
            if lane.count < needed:
                missing.append((lane, needed))
            numbers.append(lane.number)
        if missing:
            self._send(missing)
        return numbers

    def _new_lane(self, pages: "list[array[int]]", chunks: Seq[Chunk]) -> _Lane:
        if not self._free:
            kept = {id(chunk.sequence.pages) for chunk in chunks}
            for key in [key for key in self._lanes if key not in kept]:
                self._free.append(self._lanes.pop(key).number)
        lane = self._lanes[id(pages)] = _Lane(self._free.pop(), pages)
        return lane

    def _send(self, missing: list[tuple[_Lane, int]]) -> None:
        at = [lane.number * self._pages + np.arange(lane.count, needed) for lane, needed in missing]
        rows = [np.concatenate(at)]
        for group in range(len(self.tables)):
            new = [np.frombuffer(lane.pages[group], np.int32)[lane.count : needed] for lane, needed in missing]
            rows.append(np.concatenate(new))
        where, *pages = to_device(np.stack(rows).astype(np.int64), self._device)
        for table, new_pages in zip(self.tables, pages, strict=True):
            table.view(-1).index_copy_(0, where, new_pages.int())
        for lane, needed in missing:
            lane.count = max(lane.count, needed)

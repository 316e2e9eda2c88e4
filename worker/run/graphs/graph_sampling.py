"""Samples plain rows from the static logits. Each batch size has a graph for any rows and one for greedy rows.

A row is plain if nothing adjusts its logits. A batch with any row that is not plain is sampled without a graph
(sampler.py), from the same logits.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.params import EVERY, PlainParams, Stages
from worker.kernels.sample import signed_seed
from worker.run.graphs.graph_capture import Captured
from worker.run.graphs.graph_inputs import Blocks, Columns, block_bytes, views_of
from worker.run.graphs.graph_shapes import batch_sizes
from worker.schedule.sequence import Row, Sequence

GREEDY = Stages(all_greedy=True)  # greedy rows need two kernels instead of seven


class _HostParams:
    """The columns of PlainParams in a host block. A row is rewritten only when another sequence takes it."""

    def __init__(self, block: Tensor, rows: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: view.numpy() for name, view in views_of(block, _layout(rows))}
        self._columns["top_p"][:] = 1.0
        self._pages: list[object] = [None] * rows  # `pages` of the sequence in each row, to recognize the sequence by

    def fill(self, rows: list[Row]) -> None:
        for at, (sequence, _) in enumerate(rows):
            if self._pages[at] is not sequence.pages:
                self._replace(at, sequence)
        self._columns["positions"][: len(rows)] = [output for _, output in rows]

    def _replace(self, at: int, sequence: Sequence) -> None:
        self._pages[at] = sequence.pages
        columns, sampling = self._columns, sequence.sampling
        columns["temperature"][at], columns["top_k"][at] = sampling.temperature, sampling.top_k
        columns["top_p"][at], columns["min_p"][at] = sampling.top_p, sampling.min_p
        columns["seeds"][at] = signed_seed(sequence.seed)


class PlainSampling:
    """Samples the first rows of `logits` [rows, V] into `ids` [rows]. The ids of padding rows are never read."""

    def __init__(self, logits: Tensor, ids: Tensor, kernel: Callable[..., Tensor]) -> None:
        """kernel: sample_plain, or another function with the same results."""
        most = len(ids)
        self._logits, self._ids, self._kernel, self._sizes = logits, ids, kernel, batch_sizes(most)
        self._nbytes = block_bytes(_layout(most))
        self._blocks = Blocks(self._nbytes, ids.device)
        self._host = [_HostParams(block, most) for block in self._blocks.on_host]
        self._columns = dict(views_of(self._blocks.on_device, _layout(most)))
        self._samplings: dict[tuple[int, bool], Captured] = {}

    def fill(self, rows: list[Row]) -> Captured:
        """Sends the parameters of plain rows, and returns the computation that samples these rows."""
        greedy = all([not sequence.sampling.temperature for sequence, _ in rows])
        if not greedy:
            self._host[self._blocks.next()].fill(rows)
            self._blocks.send(self._nbytes)
        return self._sampling(self._sizes[bisect_left(self._sizes, len(rows))], greedy=greedy)

    def every(self) -> Iterator[Captured]:
        """Yields the samplings of all sizes, the largest first."""
        for size in reversed(self._sizes):
            for greedy in (False, True):
                yield self._sampling(size, greedy=greedy)

    def _sampling(self, size: int, *, greedy: bool) -> Captured:
        if (size, greedy) not in self._samplings:
            params = PlainParams(**{item.name: self._columns[item.name][:size] for item in fields(PlainParams)})
            logits, ids, stages = self._logits[:size], self._ids[:size], GREEDY if greedy else EVERY

            def compute() -> None:
                ids.copy_(self._kernel(logits, params, stages))

            name = f"the sampling of {size} {'greedy ' if greedy else ''}rows"
            self._samplings[size, greedy] = Captured(name, compute)
        return self._samplings[size, greedy]


def _layout(rows: int) -> Columns:
    types = {"top_k": torch.int64, "seeds": torch.int64, "positions": torch.int64}
    yield from ((item.name, types.get(item.name, torch.float32), rows) for item in fields(PlainParams))

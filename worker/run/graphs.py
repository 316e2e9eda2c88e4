"""Decodes recorded once as CUDA graphs and replayed: one call instead of hundreds, sampling included.

A graph is of a shape: so many rows, padded, and keys up to so many positions. Each is recorded after its first step,
which runs without. What is replayed was compared with what it stands for, before anybody is served by it; whatever
goes wrong with graphs, steps run as they do without.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shared.messages import Sampling
from worker.kernels.sample import sample_plain
from worker.model.forward_inputs import ForwardInputs
from worker.run.graph_inputs import Columns, HostBlock, block_bytes
from worker.run.in_flight import HostCopy, InFlightStep
from worker.run.inputs import dummy_sequence
from worker.run.sampler import is_plain
from worker.schedule.sequence import Chunk, Plan

log = logging.getLogger("sluice.graphs")

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORTEST = 512  # positions: fewer are not worth graphs of their own

Forward = Callable[[ForwardInputs], Tensor]


class Graph(Protocol):
    """Something that was recorded, as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], object]], Graph]


class Eager:
    """Stands in for a graph where there are none: does it again."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


def cuda_recorder() -> Recorder:
    """Records on the current device. All graphs share one pool of memory: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def record(body: Callable[[], object]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                body()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails would leave its own behind
        return graph

    return record


class Shape:
    """Decodes of `batch` rows over keys of at most `max_kv_len` positions, with the memory that they are read from."""

    def __init__(self, batch: int, max_kv_len: int, page_size: int, ids: Tensor, forward: Forward) -> None:
        """`ids` [batch or more] int64: those of the last step before, and of this one after."""
        device, pages = ids.device, -(-max_kv_len // page_size)
        self.graph: Graph | None = None
        self.kept: list[Tensor] = []  # memory of others that the graph writes to: as long as there is the graph
        self._page_size, self._ids, self._forward = page_size, ids, forward
        self._block = torch.zeros(block_bytes(batch, pages), dtype=torch.uint8, device=device)
        self._columns = Columns.of(self._block, batch, pages)
        self._host = [HostBlock(batch, pages, device) for _ in range(2)]  # the last one may not be sent yet
        rows = torch.arange(batch, device=device)
        self.inputs = ForwardInputs(
            token_ids=torch.zeros_like(rows),
            positions=self._columns.positions,
            slot_mapping=self._columns.slot_mapping,
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
            seq_lens=self._columns.seq_lens,
            page_table=self._columns.page_table,
            logits_indices=rows,
            max_kv_len=max_kv_len,
        )

    def fill(self, plan: Plan, before: InFlightStep | None) -> None:
        """From now on compute() computes this step. `before`: the one whose ids its tokens may be."""
        if before is not None and before.ids.data_ptr() != self._ids.data_ptr():
            self._ids[: len(before.ids)].copy_(before.ids)
        self._host.reverse()
        self._host[0].fill(plan.chunks, before.plan.chunks if before is not None else [], self._page_size)
        self._host[0].send(self._block)

    def compute(self) -> Tensor:
        """Leaves the ids in `ids`, and returns the logits [batch, vocab] float32. Asks the device nothing."""
        columns, inputs = self._columns, self.inputs
        sampled = self._ids[columns.sources.clamp(min=0)]
        torch.where(columns.sources < 0, columns.token_ids, sampled, out=inputs.token_ids)
        logits = self._forward(inputs)
        self._ids[: len(logits)].copy_(sample_plain(logits, columns.sampling))
        return logits


class Graphs:
    """All shapes of one runner. `on`: they may be used; it never comes back once it is off."""

    def __init__(
        self,
        forward: Forward,
        record: Recorder,
        *,
        page_size: int,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
        count_replayed: Callable[[], None],
    ) -> None:
        """`replayed` is called after each replay, in which none of the code that was recorded runs."""
        self.on = True
        self._forward, self._record, self._replayed = forward, record, count_replayed
        self._page_size, self._max_seq_len = page_size, max_seq_len
        self._sizes = sizes(max_batch_size)
        self._ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._compared = False

    def take(self, plan: Plan) -> bool:
        """Whether it is a step for them: decodes only, each sampled by its logits alone."""
        chunks = plan.chunks
        if not self.on or len(chunks) > self._sizes[-1] or not all(map(_is_decode, chunks)):
            return False
        if not self._compared:
            self._compare()
        return self.on

    def launch(self, plan: Plan, before: InFlightStep | None, *, ahead: bool) -> InFlightStep:
        """A step that they take; otherwise as Runner.launch."""
        shape = self._shape(plan)
        shape.fill(plan, before)
        if shape.graph is not None:
            self._replay(shape.graph)
        else:
            shape.compute()
        ids = self._ids[: len(plan.chunks)]
        flight = InFlightStep(plan, ahead, ids, HostCopy(ids))
        if shape.graph is None and self.on:
            shape.graph = self._recorded(shape.compute)
        return flight

    def _shape(self, plan: Plan) -> Shape:
        longest = max([chunk.start for chunk in plan.chunks]) + 1
        batch = self._sizes[bisect_left(self._sizes, len(plan.chunks))]
        max_kv_len = max(longest, min(self._max_seq_len, max(SHORTEST, 1 << (longest - 1).bit_length())))
        key = batch, max_kv_len
        if key not in self._shapes:
            self._shapes[key] = Shape(batch, max_kv_len, self._page_size, self._ids, self._forward)
        return self._shapes[key]

    def _replay(self, graph: Graph) -> None:
        try:
            graph.replay()
        except Exception as error:
            self._off(f"one could not be replayed: {type(error).__name__}: {error}")
            raise
        self._replayed()

    def _recorded(self, body: Callable[[], object]) -> Graph | None:
        try:
            return self._record(body)
        except Exception as error:
            self._off(f"one could not be recorded: {type(error).__name__}: {error}")
            return None

    def _off(self, why: str) -> None:
        if self.on:
            log.warning("decodes run without CUDA graphs from now on, which is slower: %s", why)
        self.on = False

    def _compare(self) -> None:
        """One recorded with one step, replayed with another, against that one without. For nobody, in scratch."""
        self._compared = True
        try:
            wrong = self._differs()
        except Exception as error:
            wrong = f"the first one failed: {type(error).__name__}: {error}"
        if wrong:
            self._off(wrong)
        else:
            log.info("decodes are replayed as CUDA graphs, of which the first has the same bits as without")

    def _differs(self) -> str:
        first, second = _decodes(self._page_size, 0, self._sizes[-1]), _decodes(self._page_size, 3, self._sizes[-1])
        shape = self._shape(second)
        shape.fill(first, None)
        seen = shape.compute().clone()
        graph = self._record(lambda: seen.copy_(shape.compute()))
        shape.fill(second, None)
        expected = shape.compute().clone()
        ids = self._ids.clone()
        seen.fill_(torch.nan)
        self._ids.fill_(-1)
        graph.replay()
        shape.graph, shape.kept = graph, [seen]
        rows = len(seen)
        if not torch.equal(self._ids[:rows], ids[:rows]):
            return "what one samples is not what is sampled without"
        if not torch.equal(seen.view(torch.int32), expected.view(torch.int32)):
            return "the logits of one are not those without"
        return ""


def sizes(most: int) -> list[int]:
    """Batches are padded to the next of these."""
    beyond = range(SIZES[-1] + 128, most, 128)
    return [*(size for size in (*SIZES, *beyond) if size < most), most]


def _is_decode(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return chunk.length == 1 and chunk.samples and sequence.sampling.logprobs is None and is_plain(sequence)


def _decodes(page_size: int, first: int, most: int) -> Plan:
    """A decode for nobody: several sequences in the scratch page, the new token of each at a place of its own."""
    chunks = []
    for row in range(min(page_size, most, 4)):
        tokens = [first + i for i in range(row + 1)]
        sequence = dummy_sequence(tokens, page_size, Sampling(1, temperature=0.9 * (row % 2)), seed=first + row)
        chunks.append(Chunk(sequence, row, 1, True))
    return Plan(chunks)

"""One decode of a fixed shape with memory at fixed addresses, and how it is captured as a CUDA graph."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.sample import sample_plain
from worker.model.forward_inputs import ForwardInputs
from worker.run.graph_inputs import GraphInputs, HostBlock, block_bytes
from worker.run.in_flight import InFlightStep
from worker.schedule.sequence import Plan

Forward = Callable[[ForwardInputs], Tensor]


class Graph(Protocol):
    """A captured computation, such as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], object]], Graph]


class EagerGraph:
    """Stands in for a graph on devices without graphs: a replay computes again."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


def cuda_capture() -> Capture:
    """Captures on the current device. All graphs share one pool of memory, since they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(body: Callable[[], object]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                body()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream as the current one
        return graph

    return capture


class StaticDecode:
    """A decode of `batch` rows over keys of at most `max_kv_len` positions, with the memory it reads and writes."""

    def __init__(self, batch: int, max_kv_len: int, page_size: int, ids: Tensor, forward: Forward) -> None:
        """ids: [batch or more] int64, at first the ids of the step before and then the ids of this step."""
        device, pages = ids.device, -(-max_kv_len // page_size)
        self.graph: Graph | None = None
        self.graph_outputs: list[Tensor] = []  # tensors that the graph writes to: they must live as long as it does
        self._page_size, self._ids, self._forward = page_size, ids, forward
        self._block = torch.zeros(block_bytes(batch, pages), dtype=torch.uint8, device=device)
        self._columns = GraphInputs.of(self._block, batch, pages)
        self._host_blocks = [HostBlock(batch, pages, device) for _ in range(2)]  # the last one may not be sent yet
        rows = torch.arange(batch, device=device)
        self._inputs = ForwardInputs(
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
        """Loads the inputs of a plan for the next compute(). before: the step whose ids its tokens may be."""
        if before is not None and before.ids.data_ptr() != self._ids.data_ptr():
            self._ids[: len(before.ids)].copy_(before.ids)
        self._host_blocks.reverse()
        block = self._host_blocks[0]
        block.fill(plan.chunks, before.plan.chunks if before is not None else [], self._page_size)
        block.send(self._block)

    def compute(self) -> Tensor:
        """Leaves the ids in `ids` and returns the logits [batch, vocab] float32. Never waits for the device."""
        columns, inputs = self._columns, self._inputs
        sampled = self._ids[columns.sources.clamp(min=0)]
        torch.where(columns.sources < 0, columns.token_ids, sampled, out=inputs.token_ids)
        logits = self._forward(inputs)
        self._ids[: len(logits)].copy_(sample_plain(logits, columns.sampling))
        return logits

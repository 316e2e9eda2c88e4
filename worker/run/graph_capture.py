"""Captures a decode as a CUDA graph: it has a fixed shape, and its memory is at fixed addresses."""

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
    """Replaces a graph on devices without graphs. replay() runs the computation again."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


def cuda_capture() -> Capture:
    """Returns a function that captures CUDA graphs on the current device.

    All graphs share one pool of memory, because they never run at the same time.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(body: Callable[[], object]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                body()
        finally:
            torch.cuda.set_stream(stream)  # after a failed capture, the current stream is that of the capture
        return graph

    return capture


class StaticDecode:
    """A decode of `batch` rows that attend to at most `max_kv_len` positions, and the memory that it uses."""

    def __init__(
        self,
        batch: int,
        max_kv_len: int,
        page_size: int,
        groups: int,
        ids: Tensor,
        forward: Forward,
        *,
        recurrent: bool = False,
    ) -> None:
        """ids: [batch or more] int64. compute() reads the previous step's ids here and writes those of this step."""
        device, pages = ids.device, -(-max_kv_len // page_size)
        self.batch, self.max_kv_len = batch, max_kv_len
        self.graph: Graph | None = None
        self.captures_left = 2  # how many more times a capture may be tried
        self.graph_outputs: list[Tensor] = []  # tensors that the graph writes to, which must live as long as the graph
        self._page_size, self._ids, self._forward = page_size, ids, forward
        self._block = torch.zeros(block_bytes(batch, pages, groups), dtype=torch.uint8, device=device)
        self._columns = GraphInputs.of(self._block, batch, pages, groups)
        self._host_blocks = [
            HostBlock(batch, pages, groups, device, recurrent=recurrent) for _ in range(2)
        ]  # the last one may still be in use
        rows = torch.arange(batch, device=device)
        self._inputs = ForwardInputs(
            token_ids=torch.zeros_like(rows),
            positions=self._columns.positions,
            slot_mappings=self._columns.slot_mappings,
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
            seq_lens=self._columns.seq_lens,
            page_tables=self._columns.page_tables,
            logits_indices=rows,
            max_kv_len=max_kv_len,
            read_slots=self._columns.read_slots if recurrent else None,
            write_slots=self._columns.write_slots if recurrent else None,
        )

    def fill(self, plan: Plan, before: InFlightStep | None) -> None:
        """Loads the inputs of a plan for the next compute().

        before: the step in flight whose sampled tokens, not yet known to the host, are inputs of this plan
        """
        if before is not None and before.ids.data_ptr() != self._ids.data_ptr():
            self._ids[: len(before.ids)].copy_(before.ids)
        self._host_blocks.reverse()
        block = self._host_blocks[0]
        block.fill(plan.chunks, before.plan.chunks if before is not None else [], self._page_size)
        block.send(self._block)

    def compute(self) -> Tensor:
        """Writes the sampled ids to `ids` and returns the logits [batch, vocab] float32. Never waits for the device."""
        columns, inputs = self._columns, self._inputs
        sampled = self._ids[columns.sources.clamp(min=0)]
        torch.where(columns.sources < 0, columns.token_ids, sampled, out=inputs.token_ids)
        logits = self._forward(inputs)
        self._ids[: len(logits)].copy_(sample_plain(logits, columns.sampling))
        return logits

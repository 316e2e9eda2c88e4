"""Captures a forward of a fixed shape as a CUDA graph. All its inputs and outputs are at fixed addresses."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.model.inputs.forward_inputs import ForwardInputs
from worker.run.column_values import StepLayout
from worker.run.graphs.graph_inputs import Blocks, GraphInputs, HostInputs, Pending, inputs_bytes
from worker.run.graphs.graph_shapes import Shape
from worker.run.graphs.page_lanes import PageLanes
from worker.schedule.sequence import Chunk

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
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream as the current stream
        return graph

    return capture


class StepAdapters(Protocol):
    """The adapters of the captured step of one shape (worker/run/graphs/adapters_in_graphs.py)."""

    def forward(self, inputs: ForwardInputs) -> Tensor: ...

    def fill(self, layout: StepLayout, slots: Seq[int]) -> None:
        """Sends which rows have which adapter. slots: for each chunk, see GraphAdapters.place"""


class GraphAdapters(Protocol):
    """The adapters of captured steps (adapters_in_graphs.py). generation: grows when captured steps expire."""

    generation: int

    def place(self, chunks: Seq[Chunk]) -> list[int] | None: ...
    def step(self, shape: Shape) -> StepAdapters: ...
    def eager(self, chunks: Seq[Chunk], inputs: ForwardInputs) -> Tensor: ...


@dataclass(slots=True, eq=False)
class Captured:
    """A computation with all inputs and outputs at fixed addresses, and its graph once it is captured."""

    name: str
    compute: Callable[[], None]  # never waits for the device
    graph: Graph | None = None
    captures_left: int = 2  # how many more times a capture may be tried


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The memory at fixed addresses that the graphs of all shapes share. Inputs are sent to it before each replay.

    ids: the sampled ids. The next step's forward reads ids from here if the host does not know them yet.
    logits: the logits of the last forward. They stay valid for all kernels that are launched before the next replay,
    because the device runs replays and kernels in the order of one stream.
    """

    blocks: Blocks
    lanes: PageLanes
    ids: Tensor  # [most rows] int64
    logits: Tensor  # [most rows, vocab] float32
    page_size: int
    recurrent: bool  # whether layers have a recurrent state
    mrope: bool = False  # whether the model has M-RoPE, so that a row's rotary positions may differ from its position


@dataclass(slots=True, eq=False)
class StaticForward:
    """The forward of one shape: reads its inputs from a block, and writes the first rows of the static logits.

    adapters: None if no row has an adapter
    """

    shape: Shape
    memory: StaticMemory
    forward: Forward
    adapters: StepAdapters | None = None
    captured: Captured = field(init=False)
    _columns: GraphInputs = field(init=False)
    _host: list[HostInputs] = field(init=False)
    _nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        blocks, groups = self.memory.blocks, len(self.memory.lanes.tables)
        with_adapters = "" if self.adapters is None else ", with adapters"
        self.captured = Captured(f"the forward of {self.shape}{with_adapters}", self.compute)
        self._columns = GraphInputs.of(blocks.on_device, self.shape, groups)
        memory = self.memory
        self._host = [
            HostInputs(
                block, self.shape, groups, page_size=memory.page_size, scratch=memory.lanes.scratch,
                recurrent=memory.recurrent, mrope=memory.mrope,
            )
            for block in blocks.on_host
        ]  # fmt: skip
        self._nbytes = inputs_bytes(self.shape, groups)

    def fill(self, layout: StepLayout, pending: Pending, lanes: list[int], slots: Seq[int] = ()) -> None:
        """Sends the inputs of a step for the next compute(). slots: for each chunk, see GraphAdapters.place"""
        memory = self.memory
        self._host[memory.blocks.next()].fill(layout, pending, lanes)
        memory.blocks.send(self._nbytes)
        if self.adapters is not None:
            self.adapters.fill(layout, slots)

    def fill_padding(self) -> None:
        """Sends the inputs of a step that consists only of padding."""
        memory = self.memory
        self._host[memory.blocks.next()].fill_padding()
        memory.blocks.send(self._nbytes)

    def compute(self) -> None:
        """Computes the static logits. Never waits for the device."""
        memory, graph, shape = self.memory, self._columns, self.shape
        pages = -(-shape.max_kv_len // memory.page_size)
        columns, sampled = graph.forward_columns(recurrent=memory.recurrent), memory.ids[graph.sources.clamp(min=0)]
        columns["token_ids"] = torch.where(graph.sources < 0, columns["token_ids"], sampled)
        inputs = ForwardInputs(
            **columns,
            page_tables=tuple(table[:, :pages].index_select(0, graph.lanes) for table in memory.lanes.tables),
            max_kv_len=shape.max_kv_len,
            rope_rows=graph.rope_rows if memory.mrope else None,
            any_rows=shape.mixed,  # also in a shape with as many rows of logits as tokens
        )
        memory.logits[: shape.rows].copy_(self.forward(inputs))

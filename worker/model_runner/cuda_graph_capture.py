"""Captures a forward of a fixed shape as a CUDA graph. All its inputs and outputs are at fixed addresses."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.model_runner.cuda_graph_inputs import (
    Blocks,
    Columns,
    DevicePageTables,
    GraphInputs,
    HostInputs,
    Pending,
    Shape,
    batch_sizes,
    block_bytes,
    inputs_bytes,
    views_of,
)
from worker.model_runner.inputs import BatchMetadata
from worker.models.forward_inputs import ForwardInputs
from worker.ops.sampling.reference import EVERY, PlainParams, Stages, signed_seed
from worker.scheduler.sequence import AdapterUse, Chunk, Plan, Row, Sequence

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
    """The adapters of the captured step of one shape (worker/model_runner/cuda_graph_adapters.py)."""

    def forward(self, inputs: ForwardInputs) -> Tensor: ...

    def fill(self, layout: BatchMetadata, slots: Seq[int]) -> None:
        """Sends which rows have which adapter. slots: for each chunk, see GraphAdapters.place"""


class GraphAdapters(Protocol):
    """The adapters of captured steps (cuda_graph_adapters.py). generation: grows when captured steps expire."""

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
    table_rows: DevicePageTables
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
        blocks, groups = self.memory.blocks, len(self.memory.table_rows.tables)
        with_adapters = "" if self.adapters is None else ", with adapters"
        self.captured = Captured(f"the forward of {self.shape}{with_adapters}", self.compute)
        self._columns = GraphInputs.of(blocks.on_device, self.shape, groups)
        memory = self.memory
        self._host = [
            HostInputs(
                block, self.shape, groups, page_size=memory.page_size, scratch=memory.table_rows.scratch,
                recurrent=memory.recurrent, mrope=memory.mrope,
            )
            for block in blocks.on_host
        ]  # fmt: skip
        self._nbytes = inputs_bytes(self.shape, groups)

    def fill(self, layout: BatchMetadata, pending: Pending, table_rows: list[int], slots: Seq[int] = ()) -> None:
        """Sends the inputs of a step for the next compute(). slots: for each chunk, see GraphAdapters.place"""
        memory = self.memory
        self._host[memory.blocks.next()].fill(layout, pending, table_rows)
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
            page_tables=tuple(table[:, :pages].index_select(0, graph.table_rows) for table in memory.table_rows.tables),
            max_kv_len=shape.max_kv_len,
            rope_rows=graph.rope_rows if memory.mrope else None,
            any_rows=shape.mixed,  # also in a shape with as many rows of logits as tokens
            sources=graph.sources,
        )
        memory.logits[: shape.rows].copy_(self.forward(inputs))


# Samples plain rows from the static logits. Each batch size has a graph for any rows and one for greedy rows.
#
# A row is plain if nothing adjusts its logits. A batch with any row that is not plain is sampled without a graph
# (sampler.py), from the same logits.

GREEDY = Stages(all_greedy=True)  # greedy rows need two kernels instead of seven


class _HostParams:
    """The columns of PlainParams in a host block. A row is rewritten only when another sequence takes it."""

    def __init__(self, block: Tensor, rows: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: view.numpy() for name, view in views_of(block, _layout(rows))}
        self._columns["top_p"][:] = 1.0
        self._pages: list[object] = [None] * rows  # `pages` of the sequence in each row, to recognize the sequence by

    def fill(self, rows: list[Row]) -> None:
        for at, (sequence, *_) in enumerate(rows):
            if self._pages[at] is not sequence.pages:
                self._replace(at, sequence)
        self._columns["positions"][: len(rows)] = [output for _, output, _ in rows]

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
        greedy = all([not sequence.sampling.temperature for sequence, *_ in rows])
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


# The captured forwards of steps with LoRA adapters, one for each shape.
#
# They are captured after the first step of their shape, and again whenever an adapter changes more than those before
# it (worker/model_runner/cuda_graph_adapters.py). Steps without adapters have other graphs, and pay nothing for
# these.


@dataclass(slots=True, eq=False)
class AdaptedForwards:
    """make: called before the first step with adapters. on: whether graphs may be used for such steps. tested: whether
    the self-test has run.
    """

    make: Callable[[], GraphAdapters]
    memory: StaticMemory
    on: bool = True
    tested: bool = False
    of_shapes: dict[Shape, StaticForward] = field(default_factory=dict)
    _adapters: GraphAdapters | None = None
    _generation: int = 0

    def place(self, chunks: Seq[Chunk]) -> list[int] | None:
        """Returns the slot of each chunk's adapter; None if the step must run without a graph."""
        slots = self._made().place(chunks)
        if self._made().generation != self._generation:
            self.of_shapes, self._generation = {}, self._made().generation
        return slots

    def step(self, shape: Shape) -> StaticForward:
        """Returns the forward of a shape. Call place() first, which may make earlier ones expire."""
        if shape not in self.of_shapes:
            adapters = self._made().step(shape)
            self.of_shapes[shape] = StaticForward(shape, self.memory, adapters.forward, adapters)
        return self.of_shapes[shape]

    def eager(self, chunks: Seq[Chunk], inputs: ForwardInputs) -> Tensor:
        """Returns the logits of a step without a graph, [R, vocab] float32."""
        return self._made().eager(chunks, inputs)

    def _made(self) -> GraphAdapters:
        if self._adapters is None:
            self._adapters = self.make()
        return self._adapters


def with_adapters(plan: Plan, uses: Seq[AdapterUse]) -> Plan:
    """Gives every other sequence of a dummy step one of these adapters. Returns the plan."""
    for number, chunk in enumerate(plan.chunks):
        chunk.sequence.adapter = None if number % 2 else uses[number // 2 % len(uses)]
    return plan

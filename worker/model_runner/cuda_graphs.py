"""Captures steps once as CUDA graphs and replays them: one call for the forward, and one for the sampling.

    inputs in static memory ─ forward graph ─> static logits ─ sampling graph ─> static ids
                                                      └─ eager sampling and log-probabilities of rows that are not plain

All steps that have a shape (cuda_graph_inputs.py) are replayed: decodes, and steps with prompt chunks or drafts. Steps
with pooling or prompt log-probabilities, and steps that are too large, run without a graph.

Steps with LoRA adapters have captured forwards of their own (cuda_graph_adapters.py), so that other steps do not pay
for them. They are captured after the first step of each shape, because their size depends on the adapters.

A replay computes the same bits as the step without a graph: it runs the same kernels, and in no kernel does a row
depend on other rows or on padding. Before the first graph serves a request, a self-test compares replays with the same
steps without graph and padding. If the self-test or a replay fails, graphs are turned off.

All shapes are captured before serving. If the capture of a shape failed, or memory was short, the shape is captured
after its first step. If this fails too, the capture is tried once more. After that, steps of this shape run without a
graph.
"""

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from shared.messages import Sampling
from worker.kv_cache.tensors import KVCache
from worker.model_runner.cuda_graph_capture import (
    AdaptedForwards,
    Capture,
    Captured,
    EagerGraph,
    Forward,
    GraphAdapters,
    PlainSampling,
    StaticForward,
    StaticMemory,
    cuda_capture,
    with_adapters,
)
from worker.model_runner.cuda_graph_inputs import Blocks, DevicePageTables, Shape, Shapes, inputs_bytes
from worker.model_runner.inputs import build_inputs, dummy_sequence, lay_out_decodes, pending_tokens, prepare_batch
from worker.model_runner.sampler import is_plain
from worker.model_runner.step import InFlightStep
from worker.models.forward_inputs import Model
from worker.scheduler.sequence import AdapterUse, Chunk, Plan, Row, has_adapters

log = logging.getLogger("sluice.graphs")
LEAST_FREE = 256 << 20  # bytes; with less free memory, no more graphs are captured before serving


def step_graphs(
    model: Model, cache: KVCache, forward: Forward, make_adapters: Callable[[Shapes], GraphAdapters], *,
    max_batch_size: int, max_step_tokens: int, mrope: bool, batch_invariant: bool,
) -> "StepGraphs":  # fmt: skip
    """Returns the graphs of a runner. On the CPU, a replay computes the step again. The rest: see StepGraphs."""
    shapes = Shapes(max_batch_size, max_step_tokens, model.max_positions)
    return StepGraphs(
        forward, cuda_capture() if cache.device.type == "cuda" else EagerGraph, model.operations.sample_plain,
        shapes=shapes, vocab_size=model.spec.vocab_size, page_size=cache.page_size, groups=len(cache.groups),
        recurrent=bool(cache.states), mrope=mrope, batch_invariant=batch_invariant, device=cache.device,
        count_replayed=model.count_replayed, make_adapters=partial(make_adapters, shapes),
    )  # fmt: skip


class StepGraphs:
    """The graphs of one runner. on: whether graphs may be used. Once it is False, it stays False."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        sample: Callable[..., Tensor],
        *,
        shapes: Shapes,
        vocab_size: int,
        page_size: int,
        groups: int,
        recurrent: bool,
        mrope: bool,
        batch_invariant: bool,
        device: torch.device,
        count_replayed: Callable[[], None],
        make_adapters: Callable[[], GraphAdapters],
    ) -> None:
        """sample: a function like sample_plain. groups: how many groups of layers have page tables.

        recurrent: whether layers have a recurrent state. mrope: whether the model has M-RoPE. batch_invariant: whether
            padding must not change a bit.
        count_replayed: called after each replay of a forward, because a replay does not run the Python code of layers.
        make_adapters: called before the first step with adapters
        """
        self.on = True
        self.most_tokens = max(shape.tokens for shape in shapes.all_shapes())
        self._forward, self._capture, self._count_replayed = forward, capture, count_replayed
        self._shapes, self._batch_invariant, self._device = shapes, batch_invariant, device
        nbytes = max(inputs_bytes(shape, groups) for shape in shapes.all_shapes())
        self._memory = StaticMemory(
            Blocks(nbytes, device),
            DevicePageTables(shapes.max_batch_size, -(-shapes.longest // page_size), groups, device),
            ids=torch.zeros(shapes.most_rows, dtype=torch.int64, device=device),
            logits=torch.zeros(shapes.most_rows, vocab_size, device=device),
            page_size=page_size,
            recurrent=recurrent,
            mrope=mrope,
        )
        self._sampling = PlainSampling(self._memory.logits, self._memory.ids, sample)
        self._forwards: dict[Shape, StaticForward] = {}
        self._tested = False
        self._adapted = AdaptedForwards(make_adapters, self._memory)

    def launch(self, plan: Plan, rows: list[Row], before: InFlightStep | None) -> tuple[Tensor, Tensor | None] | None:
        """Launches a step and returns its logits and, if all rows are plain, their sampled ids.

        Returns None, and launches nothing, if the step must run without a graph. The results are static memory: only
        kernels and copies that are launched before the next step may read them. rows: plan.rows; plan, before: see
        Runner.launch.
        """
        found = self._forward_for(plan, before)
        if found is None:
            return None
        step, slots = found
        self._fill(step, plan, before, slots)
        sampling = self._sampling.fill(rows) if rows and all([is_plain(sequence) for sequence, *_ in rows]) else None
        self._run(step.captured)
        if step.captured.graph is not None:
            self._count_replayed()
        if sampling is not None:
            self._run(sampling)
        for captured in (step.captured, sampling):
            if captured is not None and captured.graph is None and captured.captures_left:
                self._try_capture(captured)
        count = len(rows)
        return self._memory.logits[:count], None if sampling is None else self._memory.ids[:count]

    def capture_all(self, free_bytes: Callable[[], int], on_progress: Callable[[], None]) -> None:
        """Captures every shape before serving; stops when memory gets short. free_bytes: returns the free memory."""
        begun, free, count = time.monotonic(), free_bytes(), 0
        self._self_test()
        try:
            for captured in self._ready_to_capture() if self.on else ():
                if (left := free_bytes()) < LEAST_FREE:
                    raise torch.OutOfMemoryError(f"{left >> 20} MiB of memory are free")
                captured.graph = captured.graph or self._capture(captured.compute)
                count += 1
                on_progress()
        except Exception as error:
            log.warning(
                "only %d CUDA graphs are captured before serving; further ones are captured while serving, or their "
                "steps run without a graph, which is slower: %s: %s",
                count, type(error).__name__, error,
            )  # fmt: skip
        log.info(
            "captured %d CUDA graphs in %.1f s; they take %.2f GiB",
            count, time.monotonic() - begun, (free - free_bytes()) / (1 << 30),
        )  # fmt: skip

    def _ready_to_capture(self) -> Iterator[Captured]:
        """Yields everything to capture, after its kernels have run once, because a capture must not compile kernels."""
        ran = set[tuple[int, int]]()
        for shape in self._shapes.all_shapes():
            step = self._step(shape)
            if (shape.tokens, shape.sequences) not in ran:
                step.fill_padding()
                step.compute()
                ran.add((shape.tokens, shape.sequences))
            yield step.captured
        for sampling in self._sampling.every():
            sampling.compute()
            yield sampling

    def _forward_for(self, plan: Plan, before: InFlightStep | None) -> tuple[StaticForward, Seq[int]] | None:
        """Returns the forward of the step's shape, and the slots of its adapters (AdaptedForwards.place); () without
        adapters. Returns None if the step must run without a graph.
        """
        if not self.on or (before is not None and len(before.ids) > len(self._memory.ids)):
            return None
        adapted = has_adapters(plan)
        shape = _shape(self._shapes, plan, adapted=adapted)
        if shape is None:
            return None
        if not self._tested:
            self._self_test()
        if adapted and not self._adapted.tested:
            self._test_adapters(plan)
        found = self._placed(plan, shape, adapted=adapted)
        if found is None or (found[0].captured.graph is None and not found[0].captured.captures_left):
            return None
        return found

    def _placed(self, plan: Plan, shape: Shape, *, adapted: bool) -> tuple[StaticForward, Seq[int]] | None:
        if not self.on or (adapted and not self._adapted.on):
            return None
        if not adapted:
            return self._step(shape), ()
        slots = self._adapted.place(plan.chunks)
        return None if slots is None else (self._adapted.step(shape), slots)

    def _step(self, shape: Shape) -> StaticForward:
        if shape not in self._forwards:
            self._forwards[shape] = StaticForward(shape, self._memory, self._forward)
        return self._forwards[shape]

    def _fill(self, step: StaticForward, plan: Plan, before: InFlightStep | None, slots: Seq[int] = ()) -> None:
        memory, chunks = self._memory, plan.chunks
        if before is not None and before.ids.data_ptr() != memory.ids.data_ptr():
            memory.ids[: len(before.ids)].copy_(before.ids)
        size = memory.page_size
        layout = prepare_batch(chunks, size)[0] if step.shape.mixed else lay_out_decodes(chunks, size)
        pending = pending_tokens(chunks, before.plan.chunks if before is not None else [])
        step.fill(layout, pending, memory.table_rows.rows_of(chunks, size), slots)

    def _run(self, captured: Captured) -> None:
        if captured.graph is None:
            return captured.compute()
        try:
            captured.graph.replay()
        except Exception as error:
            self._turn_off(f"{captured.name} could not be replayed: {type(error).__name__}: {error}")
            raise

    def _try_capture(self, captured: Captured) -> None:
        captured.captures_left -= 1
        try:
            captured.graph = self._capture(captured.compute)
        except Exception as error:  # for example, no memory is free at this moment
            outlook = "it is tried once more" if captured.captures_left else "runs without a graph, which is slower"
            log.warning(
                "%s could not be captured as a CUDA graph, and %s: %s: %s",
                captured.name, outlook, type(error).__name__, error,
            )  # fmt: skip

    def _turn_off(self, reason: str) -> None:
        if self.on:
            log.warning("steps run without CUDA graphs from now on, which is slower: %s", reason)
        self.on = False

    def _self_test(self) -> None:
        self._tested = True
        try:
            failure = self._test_replays()
        except Exception as error:
            failure = f"the first one failed: {type(error).__name__}: {error}"
        if failure:
            self._turn_off(failure)
        else:
            log.info("steps are replayed as CUDA graphs; a self-test gave the same bits with and without")

    def _test_adapters(self, plan: Plan) -> None:
        """Tests the captured steps with adapters, once, with the adapters of a plan."""
        self._adapted.tested = True
        uses = [chunk.sequence.adapter for chunk in plan.chunks if chunk.sequence.adapter is not None]
        try:
            failure = self._test_replays(uses)
        except Exception as error:
            failure = f"the first one failed: {type(error).__name__}: {error}"
        if failure:
            log.warning("steps with adapters run without CUDA graphs, which is slower: %s", failure)
            self._adapted.on = False

    def _test_replays(self, uses: Seq[AdapterUse] = ()) -> str:
        """Returns how a replay differs from the same step without a graph, or "" if no replay differs.

        uses: the adapters of the steps
        """
        size, groups, most = self._memory.page_size, len(self._memory.table_rows.tables), self._shapes.max_batch_size
        for kind in (dummy_decodes, dummy_mixed):
            first, second = kind(size, groups, 0, most), kind(size, groups, 4, most)
            if first is None or second is None:
                continue
            if uses:
                first, second = with_adapters(first, uses), with_adapters(second, uses[::-1])
            if failure := self._test_replay(first, second, adapted=bool(uses)):
                return failure
        return ""

    def _test_replay(self, first: Plan, second: Plan, *, adapted: bool) -> str:
        """Captures dummy steps `first`, replays them with the inputs of `second`, and computes `second` without graphs.

        Both have the same shape. Uses only the scratch page.
        """
        shape = _shape(self._shapes, second, adapted=adapted)
        if shape is None:
            return ""
        found, given = [self._placed(plan, shape, adapted=adapted) for plan in (first, second)]
        if found is None or given is None:
            return ""
        (step, slots), logits, ids, rows = given, self._memory.logits, self._memory.ids, len(second.rows)
        self._fill(step, first, None, found[1])
        sampling = self._sampling.fill(first.rows)
        for captured in (step.captured, sampling):
            captured.compute()
            captured.graph = captured.graph or self._capture(captured.compute)
        self._fill(step, second, None, slots)
        self._sampling.fill(second.rows)
        step.compute()
        sampling.compute()
        padded, sampled = logits[:rows].clone(), ids[:rows].clone()
        inputs, _ = build_inputs(second.chunks, self._memory.page_size, self._device, recurrent=self._memory.recurrent)
        eager = self._adapted.eager(second.chunks, inputs) if adapted else self._forward(inputs)
        if self._batch_invariant and not same_bits(eager, padded):
            return f"padding to {step.shape} changes the logits"
        logits.fill_(torch.nan)
        ids.fill_(-1)
        self._run(step.captured)
        self._run(sampling)
        if not same_bits(logits[:rows], padded):
            return f"a replay of {step.shape} computes other logits than the same step without a graph"
        if not torch.equal(ids[:rows], sampled):
            return f"a replay of {sampling.name} gives other ids than without a graph"
        return ""


def _shape(shapes: Shapes, plan: Plan, *, adapted: bool) -> Shape | None:
    """Returns the shape that a step is padded to, or None if it has none. adapted: whether it has adapters."""
    chunks = plan.chunks
    if any([_needs_other_rows(chunk) for chunk in chunks]):
        return None
    longest = max([chunk.start + chunk.length for chunk in chunks])
    if all([chunk.length == 1 and chunk.samples for chunk in chunks]):
        return shapes.decode(len(chunks), longest)
    return shapes.mixed(plan.tokens, len(chunks), sum([chunk.rows for chunk in chunks]), longest, apart=adapted)


def _needs_other_rows(chunk: Chunk) -> bool:
    """Whether the chunk needs logits or hidden states of rows that are not sampled."""
    sequence = chunk.sequence
    scored = sequence.sampling.prompt_logprobs and chunk.start < sequence.prompt_len
    return sequence.pooling is not None or scored


# Dummy steps for the self-test of graphs: decodes, and a mixed step.
#
# They compute in the scratch page. Each token of a step needs its own slot there. The last slot is not used, because
# padding writes to it.

MIXED_LENGTHS = (3, 1, 1, 4)  # the lengths of the chunks of a mixed step; the first length varies with `seed`
MOST_SLOTS = 12  # the maximum number of slots that a dummy step writes


def dummy_decodes(page_size: int, groups: int, seed: int, most: int) -> Plan:
    """Returns decodes of up to four sequences. Half of them are sampled at random."""
    return _dummy_plan([1] * max(1, min(page_size - 1, most, 4)), page_size, groups, seed)


def dummy_mixed(page_size: int, groups: int, seed: int, most: int) -> Plan | None:
    """Returns chunks of one and of several tokens, for at most `most` sequences; None if a page is too small."""
    lengths = [MIXED_LENGTHS[0] + seed % 3, *MIXED_LENGTHS[1:]][-most:]
    return _dummy_plan(lengths, page_size, groups, seed) if page_size > MOST_SLOTS else None


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two float32 tensors are equal bit by bit. Waits for the device."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def _dummy_plan(lengths: list[int], page_size: int, groups: int, seed: int) -> Plan:
    chunks, start = [], 0
    for number, length in enumerate(lengths):
        tokens = [seed + i for i in range(start + length)]
        sampling = Sampling(1, temperature=0.9 * (number % 2))
        sequence = dummy_sequence(tokens, page_size, groups, sampling, seed=seed + number)
        chunks.append(Chunk(sequence, start, length, True))
        start += length
    return Plan(chunks)

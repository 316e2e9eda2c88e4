"""Captures decodes once as CUDA graphs and replays them: one call instead of hundreds, including sampling.

There is one graph for each shape, which is a padded number of rows and a bound on the positions of keys. A shape is
captured after its first step, which runs without a graph. If that fails, it is tried once more after the next step of
the shape, whose steps then run without a graph. Before the first graph serves a request, a self-test compares a replay
with the same step without a graph. If the self-test or a replay fails, graphs are turned off.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable

import torch

from shared.messages import Sampling
from worker.run.graph_capture import Capture, Forward, Graph, StaticDecode
from worker.run.in_flight import HostCopy, InFlightStep
from worker.run.inputs import dummy_sequence
from worker.run.sampler import is_plain
from worker.schedule.sequence import Chunk, Plan

log = logging.getLogger("sluice.graphs")

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MIN_KV_LEN = 512  # in positions: shorter sequences are not worth graphs of their own


class DecodeGraphs:
    """The graphs of one runner. on: whether graphs may be used. Once it is False, it stays False."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        page_size: int,
        groups: int,
        recurrent: bool,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device,
        count_replayed: Callable[[], None],
    ) -> None:
        """groups: how many groups of layers have page tables. recurrent: whether layers have a recurrent state.
        count_replayed: called after each replay, because a replay does not run the captured Python code."""
        self.on = True
        self._forward, self._capture, self._count_replayed = forward, capture, count_replayed
        self._page_size, self._groups, self._max_seq_len = page_size, groups, max_seq_len
        self._recurrent = recurrent
        self._batch_sizes = batch_sizes(max_batch_size)
        self._ids = torch.zeros(self._batch_sizes[-1], dtype=torch.int64, device=device)
        self._decodes: dict[tuple[int, int], StaticDecode] = {}
        self._tested = False

    def accepts(self, plan: Plan) -> bool:
        """Whether a graph can run the step: it has only decodes, each sampled from unadjusted logits."""
        chunks = plan.chunks
        return self.on and len(chunks) <= self._batch_sizes[-1] and all(map(_is_plain_decode, chunks))

    def launch(self, plan: Plan, before: InFlightStep | None, *, may_overlap: bool) -> InFlightStep:
        """Launches a step for which accepts() is True. The parameters are those of Runner.launch."""
        if not self._tested:
            self._self_test()
        decode = self._decode_for(plan)
        decode.fill(plan, before)
        if decode.graph is not None:
            self._replay(decode.graph)
        else:
            decode.compute()
        ids = self._ids[: len(plan.chunks)]
        step = InFlightStep(plan, may_overlap, ids, HostCopy(ids))
        if decode.graph is None and decode.captures_left and self.on:
            self._try_capture(decode)
        return step

    def _decode_for(self, plan: Plan) -> StaticDecode:
        longest = max([chunk.start for chunk in plan.chunks]) + 1
        batch = self._batch_sizes[bisect_left(self._batch_sizes, len(plan.chunks))]
        max_kv_len = max(longest, min(self._max_seq_len, max(MIN_KV_LEN, 1 << (longest - 1).bit_length())))
        key = batch, max_kv_len
        if key not in self._decodes:
            self._decodes[key] = StaticDecode(
                batch, max_kv_len, self._page_size, self._groups, self._ids, self._forward, recurrent=self._recurrent
            )
        return self._decodes[key]

    def _replay(self, graph: Graph) -> None:
        try:
            graph.replay()
        except Exception as error:
            self._turn_off(f"one could not be replayed: {type(error).__name__}: {error}")
            raise
        self._count_replayed()

    def _try_capture(self, decode: StaticDecode) -> None:
        decode.captures_left -= 1
        try:
            decode.graph = self._capture(decode.compute)
        except Exception as error:  # such as a moment without free memory
            outlook = "it is tried once more" if decode.captures_left else "they run without one, which is slower"
            log.warning(
                "the CUDA graph for %d decodes of up to %d positions could not be captured, and %s: %s: %s",
                decode.batch, decode.max_kv_len, outlook, type(error).__name__, error,
            )  # fmt: skip

    def _turn_off(self, reason: str) -> None:
        if self.on:
            log.warning("decodes run without CUDA graphs from now on, which is slower: %s", reason)
        self.on = False

    def _self_test(self) -> None:
        self._tested = True
        try:
            failure = self._test_replay()
        except Exception as error:
            failure = f"the first one failed: {type(error).__name__}: {error}"
        if failure:
            self._turn_off(failure)
        else:
            log.info("decodes are replayed as CUDA graphs; a self-test gave the same bits with and without")

    def _test_replay(self) -> str:
        """Tests a graph: captures it with dummy step A, replays it with dummy step B, and computes B without it.

        Returns how the results differ, or "" if they are equal. Uses only the scratch page.
        """
        most = self._batch_sizes[-1]
        step_a, step_b = (_dummy_decodes(self._page_size, self._groups, first, most) for first in (0, 3))
        decode = self._decode_for(step_b)
        decode.fill(step_a, None)
        logits = decode.compute().clone()
        graph = self._capture(lambda: logits.copy_(decode.compute()))
        decode.fill(step_b, None)
        expected = decode.compute().clone()
        ids = self._ids.clone()
        logits.fill_(torch.nan)
        self._ids.fill_(-1)
        graph.replay()
        rows = len(logits)
        if not torch.equal(self._ids[:rows], ids[:rows]):
            return "a replay samples other ids than the same step without a graph"
        if not torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
            return "a replay computes other logits than the same step without a graph"
        decode.graph, decode.graph_outputs = graph, [logits]
        return ""


def batch_sizes(most: int) -> list[int]:
    """Returns the sizes that batches are padded to, in ascending order up to `most`."""
    larger = range(BATCH_SIZES[-1] + 128, most, 128)
    return [*(size for size in (*BATCH_SIZES, *larger) if size < most), most]


def _is_plain_decode(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return chunk.length == 1 and chunk.samples and sequence.sampling.logprobs is None and is_plain(sequence)


def _dummy_decodes(page_size: int, groups: int, first: int, most: int) -> Plan:
    """Returns decodes of several dummy sequences, whose new tokens go to different slots of the scratch page."""
    chunks = []
    for row in range(min(page_size, most, 4)):
        tokens = [first + i for i in range(row + 1)]
        sampling = Sampling(1, temperature=0.9 * (row % 2))
        sequence = dummy_sequence(tokens, page_size, groups, sampling, seed=first + row)
        chunks.append(Chunk(sequence, row, 1, True))
    return Plan(chunks)

"""Pipeline stages of a model, each in a thread, pass on the rows of a step and compute the bits of the whole model."""

import re
import shutil
import socket
import threading
import time
from collections import deque
from ctypes import c_uint64
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.gguf.translated import translated
from tests.checkpoints import Checkpoints
from tests.gguf_files import mixed, write
from tests.patience import PATIENCE_S
from tests.worker.distributed.staged import decoder_of, exchanges, parts_for, spec_of, staged
from tests.worker.distributed.threads import together
from tests.worker.models.harness import CPU, advance, cache_for, pack, prompts_of, rows_for
from tests.worker.models.quantized_checkpoints import gptq, rewrite
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.distributed.checks import RankDiffers
from worker.distributed.exchange import Exchange, PartDecoder
from worker.distributed.messages import rows_frame, send
from worker.distributed.pipeline import (
    PROGRESS_S,
    BegunStep,
    RankDecoder,
    ReturnedRows,
    Ring,
    StageDecoder,
    tell_progress,
)
from worker.kv_cache.tensors import KVCache
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import CannotShare, Part, bounds_of_stages
from worker.ops.exchange import RankLost
from worker.quantization.methods import AS_STORED, InMemory, in_memory

LENGTHS = [1, 5, 16, 17, 40, 70]


def whole_model(folder: Path, dtype: torch.dtype, memory: InMemory) -> tuple[Any, KVCache]:
    spec = spec_of(folder)
    whole = Decoder(spec, load(folder, spec, dtype, CPU, invariant=True, memory=memory), 512)
    cache = cache_for(whole, tokens=512)
    return fastest_decoder(whole, cache), cache


def check_bits(folder: Path, parts: tuple[Part, ...], dtype: torch.dtype, memory: InMemory = AS_STORED) -> None:
    """Checks steps of prompts, of decodes and of both. Some steps want no logits, and one wants logits of all rows.

    As many steps as there are stages are begun before the rows of the first one are read.
    """
    model, cache = whole_model(folder, dtype, memory)
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    begun = deque[tuple[BegunStep, ForwardInputs, Tensor]]()
    with staged(folder, parts, dtype, memory) as one, torch.inference_mode():
        for number, chunk in enumerate([33, 1, 1, 33, 33]):
            chunks = advance(rows, chunk)
            inputs = pack(chunks, cache.page_size, all_rows=number == 3)
            begun.append((one.begin(inputs), inputs, model.forward(inputs, cache)))
            if len(begun) == one.stages:
                check_oldest(begun, cache)
            for row, length in chunks:
                row.advance(length)
        while begun:
            check_oldest(begun, cache)


def check_oldest(begun: deque[tuple[BegunStep, ForwardInputs, Tensor]], cache: KVCache) -> None:
    step, inputs, expected = begun.popleft()
    assert torch.equal(step.forward(inputs, cache), expected)


KINDS = (
    "llama", "llama-biased", "qwen3", "gemma3", "gemma4-inputs", "gemma4-dense", "olmo2", "cohere2", "gpt-oss",
    "qwen2-moe", "gemma4-moe", "qwen3_5", "qwen3-next", "lfm2-moe", "granite-hybrid", "cohere2-moe", "nemotron-h",
)  # fmt: skip


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_bits_of_the_whole_model(
    checkpoints: Checkpoints, kind: str, stages: int, dtype: torch.dtype
) -> None:
    """Most models have three layers, so two stages have different numbers of layers, and some stages have no K/V."""
    folder = checkpoints(kind)
    check_bits(folder, parts_for(spec_of(folder), stages), dtype)


@needs_library
@pytest.mark.parametrize(("kind", "stages"), [("llama-biased", 2), ("qwen2-moe", 3), ("qwen3_5", 2), ("gemma4", 2)])
def test_stages_of_two_ranks_each_give_the_bits_of_the_whole_model(
    checkpoints: Checkpoints, kind: str, stages: int
) -> None:
    folder = checkpoints(kind)
    check_bits(folder, parts_for(spec_of(folder), stages, tp_size=2), torch.bfloat16)


@needs_library
@pytest.mark.parametrize("bits", ["gptq", "int8", "int4-g32"])
def test_stages_of_weights_in_few_bits_give_the_bits_of_the_whole_model(
    checkpoints: Checkpoints, tmp_path: Path, bits: str
) -> None:
    folder, memory = Path(shutil.copytree(checkpoints("llama-biased"), tmp_path / "m")), AS_STORED
    if bits == "gptq":
        folder = rewrite(folder, gptq(act_order=True))
    else:
        memory = in_memory(None, bits, CPU)
    check_bits(folder, parts_for(spec_of(folder), 3), torch.bfloat16, memory)


@needs_library
def test_stages_of_a_gguf_file_give_the_bits_of_the_whole_model(tmp_path: Path) -> None:
    folder = translated([write("qwen3", tmp_path, mixed).file], tmp_path / "cache")
    check_bits(folder, parts_for(spec_of(folder), 2), torch.bfloat16)


@needs_library
def test_stages_hand_on_what_replaces_and_is_added_to_rows_of_images(checkpoints: Checkpoints) -> None:
    """The first stage has all layers to whose outputs image vectors are added."""
    folder = checkpoints("qwen3")
    model, cache = whole_model(folder, torch.float32, AS_STORED)
    (row,) = rows_for(cache, prompts_of([40]), 0)
    vectors = torch.randn(3, 3, model.spec.hidden_size)
    inputs = replace(
        pack([(row, 40)], cache.page_size, all_rows=True),
        replaced=(torch.tensor([4, 5, 6]), vectors[0]), added=tuple(vectors[1:]),
    )  # fmt: skip
    with torch.inference_mode():
        expected = model.forward(inputs, cache)
    bounds = bounds_of_stages(model.spec, [5, 1, 1], 0, 2, for_images=2)
    assert bounds == (0, 2, 3)
    parts = tuple(Part(rank, 1, bounds) for rank in range(2))
    with staged(folder, parts, torch.float32) as one, torch.inference_mode():
        assert torch.equal(one.forward(inputs, cache), expected)


@needs_library
def test_a_stage_computes_a_step_while_the_stage_before_computes_the_next_one(checkpoints: Checkpoints) -> None:
    """Stage 1 in its first step and stage 0 in its second one wait for each other."""
    folder = checkpoints("llama")
    model, cache = whole_model(folder, torch.float32, AS_STORED)
    inputs = [pack([(row, 40)], cache.page_size) for row in rows_for(cache, prompts_of([40, 40]), 0)]
    meet, met = threading.Barrier(2, timeout=PATIENCE_S), list[tuple[int, int]]()

    def prepare(ranks: list[RankDecoder]) -> None:
        for stage, waiting_step in enumerate([1, 0]):
            decoder = ranks[stage]
            assert isinstance(decoder, StageDecoder)
            meet_in_step(decoder, stage, waiting_step)

    def meet_in_step(decoder: StageDecoder, stage: int, waiting_step: int) -> None:
        own, steps = decoder._own.hidden, count()

        def hidden(*given: Any, **more: Any) -> Tensor:
            if (step := next(steps)) == waiting_step:
                meet.wait()
                met.append((stage, step))
            return own(*given, **more)

        decoder._own.hidden = hidden  # type: ignore[method-assign]

    with staged(folder, parts_for(spec_of(folder), 2), torch.float32, prepare=prepare) as one, torch.inference_mode():
        begun = [one.begin(each) for each in inputs]
        found = [step.forward(each, cache) for step, each in zip(begun, inputs, strict=True)]
        assert all(torch.equal(logits, model.forward(each, cache)) for logits, each in zip(found, inputs, strict=True))
    assert sorted(met) == [(0, 1), (1, 0)]


def computes_until_its_end(exchange: Exchange, stage: RankDecoder, inputs: ForwardInputs) -> None:
    """Does what the process of a rank does: connections end with it. Rank 0 waits for the rows of the step, too."""
    try:
        with torch.inference_mode():
            stage.hidden(inputs, checked=True)
            if not exchange.part.rank and exchange.ring is not None:
                exchange.ring.take()
    except RankLost:
        exchange.end()
        raise


@needs_library
def test_stage_that_is_gone_ends_the_wait_of_all_others(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    (row,) = rows_for(whole_model(folder, torch.float32, AS_STORED)[1], prompts_of([40]), 0)
    with exchanges(parts_for(spec_of(folder), 3)) as ranks:
        threading.Timer(0.3, ranks[1].end).start()
        inputs = pack([(row, 40)], 16)
        waiting = [(ranks[i], decoder_of(folder, ranks[i], torch.float32)[1]) for i in (0, 2)]
        found = together([partial(computes_until_its_end, *one, inputs) for one in waiting])
        assert all(isinstance(one, RankLost) for one in found), found


@needs_library
def test_rank_of_a_later_stage_that_differs_is_named_and_no_row_of_it_is_used(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    (row,) = rows_for(whole_model(folder, torch.float32, AS_STORED)[1], prompts_of([40]), 0)
    with exchanges(parts_for(spec_of(folder), 2, tp_size=2)) as ranks:
        stages = [decoder_of(folder, one, torch.float32)[1] for one in ranks]
        assert isinstance(stages[3], StageDecoder)
        wrong = stages[3]._own
        assert isinstance(wrong, PartDecoder)
        plain = wrong._layers.hidden

        def other(*given: Any) -> Tensor:
            return plain(*given) + 1

        wrong._layers.hidden = other  # type: ignore[method-assign, assignment]
        inputs = pack([(row, 40)], 16)
        found = together([partial(computes_until_its_end, *one, inputs) for one in zip(ranks, stages, strict=True)])
        assert isinstance(found[2], RankDiffers) and found[2].rank == 3
        assert isinstance(found[0], RankLost)


@pytest.mark.parametrize(
    ("layers", "beside", "count", "bounds"),
    [
        ([1] * 6, 0, 3, (0, 2, 4, 6)),
        ([1] * 6, 3, 3, (0, 1, 3, 6)),
        ([1] * 6, 100, 2, (0, 1, 6)),
        ([9, 1, 1, 1], 0, 3, (0, 1, 2, 4)),
        ([2, 3], 0, 2, (0, 1, 2)),
    ],
)
def test_stages_are_cut_so_that_the_largest_is_small(
    checkpoints: Checkpoints, layers: list[int], beside: int, count: int, bounds: tuple[int, ...]
) -> None:
    spec = spec_of(checkpoints("llama"))
    spec = replace(spec, layers=spec.layers[:1] * len(layers))
    assert bounds_of_stages(spec, layers, beside, count) == bounds


def test_layers_that_read_the_same_keys_stay_together(checkpoints: Checkpoints) -> None:
    """Layers 4 and 5 of this model read the K/V of layers 2 and 1."""
    plain = spec_of(checkpoints("gemma4-dense"))
    one = plain.layers[0]
    spec = replace(plain, layers=(one, one, one, one, replace(one, shares=2), replace(one, shares=1), one))
    assert bounds_of_stages(spec, [1] * 7, 0, 2) == (0, 1, 7)
    assert bounds_of_stages(spec, [1] * 7, 0, 3) == (0, 1, 6, 7)
    with pytest.raises(CannotShare, match="this model can be cut into 3 stages at most"):
        bounds_of_stages(spec, [1] * 7, 0, 4)
    stage = Part(1, 1, (0, 1, 6, 7)).stage
    assert [layer.shares for layer in stage.spec(spec).layers] == [None, None, None, 1, 0]


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("llama", 4, "--pipeline-parallel-size 4 is more than the model's 3 layers"),
        ("gemma4", 4, "--pipeline-parallel-size 4: this model can be cut into"),
    ],
)
def test_what_cannot_be_cut_is_refused(checkpoints: Checkpoints, kind: str, count: int, words: str) -> None:
    with pytest.raises(CannotShare, match=re.escape(words)):
        parts_for(spec_of(checkpoints(kind)), count)


def test_the_stage_with_most_of_a_kind_of_layers_limits_the_pools(checkpoints: Checkpoints) -> None:
    spec = spec_of(checkpoints("llama"))
    spec = replace(spec, layers=spec.layers[:1] * 6)
    assert [part.whole_kv(100, spec) for part in (Part(0, 1, (0, 2, 6)), Part(1, 1, (0, 2, 6)))] == [300, 150]
    hybrid = spec_of(checkpoints("qwen3_5"))  # the second of its three layers has K/V
    assert [Part(rank, 1, (0, 2, 3)).whole_kv(100, hybrid) for rank in range(2)] == [100, 200]


def test_every_rank_has_a_share_of_a_stage(checkpoints: Checkpoints) -> None:
    parts = parts_for(spec_of(checkpoints("llama")), 3, tp_size=2)
    assert [(one.stage.index, one.tp_rank, one.before, one.after) for one in parts] == [
        (0, 0, 4, 2), (0, 1, 5, 3), (1, 0, 0, 4), (1, 1, 1, 5), (2, 0, 2, 0), (2, 1, 3, 1),
    ]  # fmt: skip


def test_rank_0_sees_that_another_stage_goes_on_or_is_gone() -> None:
    """Layers that another stage computes count as progress of rank 0. A stage that hangs makes no progress."""
    (before, last), (ours, theirs) = socket.socketpair(), socket.socketpair()
    seen, computed, found = c_uint64(), c_uint64(7), list[Tensor]()
    threading.Thread(target=tell_progress, args=(computed, theirs), daemon=True).start()
    with before, last, ours:
        returned = ReturnedRows(Ring(before, before), [ours], seen, 2)
        waits = threading.Thread(target=lambda: found.append(returned.of_step(0)))
        waits.start()
        deadline = time.monotonic() + PATIENCE_S
        for expected in (1, 2):
            while seen.value < expected and time.monotonic() < deadline:
                time.sleep(0.01)
            computed.value += 1
        while seen.value < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(3 * PROGRESS_S)
        assert seen.value == 3, "it has computed nothing more"
        send(last, rows_frame(torch.ones(2, 3)))
        waits.join()
        assert torch.equal(found[0], torch.ones(2, 3))
        theirs.close()
        with pytest.raises(RankLost):
            returned.of_step(1)


def test_rows_are_kept_for_every_step_in_flight_and_not_for_discarded_ones() -> None:
    """A dummy step that checks the device is read before the steps in flight. Steps 4 to 6 are discarded."""
    before, last = socket.socketpair()
    with before, last:
        returned = ReturnedRows(Ring(before, before), [], c_uint64(), 3)
        for number in range(12):
            send(last, rows_frame(torch.full((2, 3), number)))
        asked = (0, 3, 1, 2, 7, 8, 9, 10, 11)
        assert [int(returned.of_step(number)[0, 0]) for number in asked] == [*asked]
        assert not returned._rows


def test_steps_with_rows_larger_than_the_buffers_of_connections_do_not_wait_for_each_other() -> None:
    """Rank 0 begins several steps before it takes any rows, while the last stage sends rows of earlier steps."""
    (ours, theirs), steps, rows = socket.socketpair(), 3, torch.zeros(1 << 22)
    buffers = sum(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for one in (ours, theirs))
    assert rows.nbytes > 8 * buffers
    first, last = Ring(ours, ours), Ring(theirs, theirs)

    def begin_all_and_finish_all() -> list[int]:
        for number in range(steps):
            first.give(rows + number)
        return [int(first.take()[-1]) for _ in range(steps)]

    def compute_all() -> None:
        for _ in range(steps):
            last.give(last.take() * 2)

    with ours, theirs:
        assert together([begin_all_and_finish_all, compute_all]) == [[0, 2, 4], None]


@pytest.mark.parametrize("kind", ["llama", "qwen2-moe", "qwen3_5"])
def test_a_stage_loads_its_layers_alone(checkpoints: Checkpoints, kind: str) -> None:
    """The first stage also has the embedding and the head. Every stage checks the whole checkpoint."""
    folder = checkpoints(kind)
    spec, told = spec_of(folder), list[tuple[int, int]]()

    def loaded(part: Part | None) -> Weights:
        def note(done: int, total: int) -> None:
            told.append((done, total))

        stage = None if part is None else part.stage
        return load(folder, spec, torch.bfloat16, CPU, invariant=True, stage=stage, on_progress=note)

    whole = loaded(None)
    in_stages = [loaded(part) for part in parts_for(spec, 2)]
    nbytes = [sum(linear.nbytes for layer in one.layers for linear in layer.linears) for one in (whole, *in_stages)]
    assert nbytes[0] == sum(nbytes[1:]) and min(nbytes) > 0
    assert [len(one.embed) for one in in_stages] == [spec.vocab_size, 1]
    assert in_stages[1].head.nbytes < in_stages[0].head.nbytes / 4
    ends = [total for done, total in told if done == total]
    assert len(ends) >= 3 and max(ends) == ends[0] and ends[-1] < ends[0]

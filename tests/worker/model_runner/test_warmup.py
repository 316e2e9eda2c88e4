"""Dummy steps cover every kind of step, stay within the limits and on the scratch page, and measure memory."""

import errno
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import Memory
from tests.worker.models.harness import CPU, decoder_of
from worker.checkpoint.checkpoint import read_config
from worker.engine.build import size_pool_and_decoder
from worker.engine.load_model import explain_out_of_memory
from worker.kv_cache.sizing import GIB, RESERVED_BYTES
from worker.kv_cache.tensors import KVCache
from worker.model_runner.runner import Runner
from worker.model_runner.warmup import (
    FEW_TOKENS,
    LONG_CONTEXT,
    PROMPT_LOGPROBS,
    PROMPT_LOGPROBS_TOKENS,
    SAMPLINGS,
    StepLimits,
    profile_memory,
    sizes,
    steps,
    warm_up,
)
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.load import load
from worker.scheduler.sequence import Plan

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 1, "max_step_tokens": 1},
    {"max_batch_size": 2, "max_step_tokens": 2, "page_size": 1},
    {"max_batch_size": 256, "max_step_tokens": 2048},
    {"use_chunked_prefill": False, "max_batch_size": 4, "max_step_tokens": 16},
    {"kv_cache_backend": "contiguous"},
]


@pytest.mark.parametrize("length", [1, 40, 3000])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_dummy_steps_stay_within_the_limits(settings: dict[str, Any], length: int) -> None:
    worker = with_default_sizes(WorkerConfig(**settings), on_gpu=True)
    bounds = StepLimits.of(worker, length)
    for plan in (*steps(bounds), bounds.largest()):
        assert plan.chunks
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            assert chunk.start >= 0 < chunk.length and chunk.samples and end == len(sequence.tokens) <= length
            assert set(sequence.pages[0]) == {0} and len(sequence.pages[0]) * bounds.page_size >= end


def test_largest_step_has_every_row_and_all_tokens() -> None:
    plan = StepLimits.of(WorkerConfig(max_batch_size=8, max_step_tokens=512), 2000).largest()
    assert (len(plan.sampling), plan.tokens) == (8, 512)
    assert {len(chunk.sequence.tokens) for chunk in plan.chunks} == {2000}, "attention over all that can be"
    short = StepLimits.of(WorkerConfig(max_batch_size=8, max_step_tokens=512), 20).largest()
    assert [chunk.length for chunk in short.chunks] == [20] * 8
    unchunked = WorkerConfig(max_batch_size=8, max_step_tokens=512, use_chunked_prefill=False)
    assert StepLimits.of(unchunked, 2000).largest().tokens == 512 + 2000 - 1, (
        "a prompt that is not cut may exceed the budget"
    )


@pytest.mark.parametrize("most", [1, 2, 15, 64, 300, 8192])
def test_sizes_leave_no_gap(most: int) -> None:
    found = sizes(most)
    assert (found[0], found[-1]) == (1, most) and found == sorted(set(found))
    assert all(after <= max(before + 1, before * 5 // 4) for before, after in itertools.pairwise(found))
    assert {16, 64, 256} & set(found) == {even for even in (16, 64, 256) if even <= most}


def test_steps_cover_every_kind() -> None:
    plans = list(steps(StepLimits.of(WorkerConfig(max_batch_size=256, max_step_tokens=2048), 4000)))
    assert {len(plan.chunks) for plan in plans if plan.tokens == len(plan.chunks)} >= set(sizes(256))
    alone = [plan.chunks[0] for plan in plans if len(plan.chunks) == 1]
    assert {chunk.length for chunk in alone if not chunk.start} >= set(sizes(2048))
    assert {chunk.length for chunk in alone if chunk.start == LONG_CONTEXT} >= {1, *FEW_TOKENS}
    asked = {chunk.sequence.sampling for plan in plans for chunk in plan.chunks}
    assert asked >= set(SAMPLINGS)
    prompts = [plan for plan in plans if any(chunk.sequence.sampling is PROMPT_LOGPROBS for chunk in plan.chunks)]
    assert {plan.tokens for plan in prompts} == {*PROMPT_LOGPROBS_TOKENS}
    assert len(plans) < 130, "each is a few milliseconds of every start"


def test_steps_cover_every_tile_of_linear() -> None:
    """Each tile is a kernel to compile. The products are Llama-3.2-3B's LM head, down, and gate with up."""
    from worker.ops.linear.triton_tiles import choose_gated_tile, choose_tile

    def tiles(rows: Iterable[int], tokens: Iterable[int]) -> tuple[set[object], ...]:
        head = {choose_tile(count, 128256, 3072, torch.bfloat16) for count in rows}
        down = {choose_tile(count, 3072, 8192, torch.bfloat16) for count in tokens}
        return head, down, {choose_gated_tile(count, 8192, 3072, torch.bfloat16) for count in tokens}

    assert tiles(range(1, 257), range(1, 4097)) == tiles(sizes(256), sizes(4096))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_profile_memory_measures_and_reports_every_step(checkpoints: Checkpoints, kind: str) -> None:
    decoder, moved, memory = decoder_of(checkpoints(kind)), [], Memory(takes=(GIB // 8, GIB // 16, GIB // 2, GIB // 4))
    worker = WorkerConfig(max_batch_size=20, max_step_tokens=64, prefill_chunk_size=64)
    budget = profile_memory(decoder, worker, 300, memory, lambda: moved.append(1))
    logits = 64 * VOCAB * 4  # 64 rows, as in the largest shape of a graph
    assert budget.nbytes == memory.device.available - GIB // 2 - GIB // 8 - GIB // 16 - logits - RESERVED_BYTES
    assert len(moved) == len(list(steps(StepLimits.of(worker, 300)))) + 4 and memory.marks == 4


def test_warm_up_writes_to_the_scratch_page_only(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("qwen3"))
    cache = KVCache(decoder.spec, (4,), 32, torch.float32, CPU)
    for part in (*cache.k, *cache.v):
        part[:, 1:] = 7.0
    bounds = StepLimits.of(WorkerConfig(max_batch_size=4, max_step_tokens=64), 200)
    warm_up(Runner(fastest_decoder(decoder, cache), cache), [*steps(bounds), bounds.largest()], lambda: None)
    assert all((part[:, 1:] == 7.0).all() and part[:, 0].isfinite().all() for part in (*cache.k, *cache.v))


def test_warm_up_raises_what_the_device_raises() -> None:
    class Broken:
        def step(self, plan: Plan) -> object:
            raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        warm_up(
            Broken(),
            steps(StepLimits.of(with_default_sizes(WorkerConfig(), on_gpu=True), 100)),
            lambda: pytest.fail("it has not moved"),
        )


def sized(folder: Path, memory: Memory, max_seq_len: int = 0, **settings: Any) -> Any:
    spec = spec_from_config(read_config(folder))
    weights = load(folder, spec, torch.float32, CPU, invariant=True)
    worker = WorkerConfig(max_batch_size=2, max_step_tokens=32, prefill_chunk_size=32, **settings)
    model = ModelConfig(model=str(folder), max_seq_len=max_seq_len)
    return size_pool_and_decoder(spec, weights, torch.float32, model, worker, memory, lambda: None)  # type: ignore[arg-type]


def test_gpu_pool_is_what_profiling_leaves(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    size, decoder = sized(folder, Memory())
    assert size.max_seq_len == longest and size.pages == (2 * longest // 32 + 1,)
    assert len(decoder.ropes[0][0]) == longest
    with pytest.raises(ConfigError, match=r"does not hold one sequence of 512 tokens .*Fake GPU has"):
        sized(folder, Memory(takes=(0, 0, 10 * GIB, 0)), max_seq_len=512)
    size, _ = sized(folder, Memory(takes=(0, 0, 10 * GIB, 0)), max_seq_len=512, kv_cache_gb=0.01)
    assert size.pages[0] > 16, "the flag has the last word"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of\nmore"),
            "(CUDA out of memory. Tried to allocate 2.00 GiB)",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "(Triton Error [CUDA]: out of memory)"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "(CUDA error: out of memory)"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "([Errno 12] Cannot allocate memory)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried. Error"), "(DefaultCPUAllocator: can't"),
    ],
)
def test_out_of_memory_is_a_config_error_of_one_sentence(error: Exception, words: str) -> None:
    with pytest.raises(ConfigError) as caught, explain_out_of_memory(Memory()):  # type: ignore[arg-type]
        raise error
    assert "Fake GPU has no room" in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="no kernel image"), explain_out_of_memory(Memory()):  # type: ignore[arg-type]
        raise RuntimeError("no kernel image")


@pytest.mark.parametrize(("decodes", "length"), [(0, 300), (0, 5000), (3, 300)])
def test_full_step_has_all_tokens_in_prompts_beside_decodes(decodes: int, length: int) -> None:
    limits = StepLimits(sequences=8, tokens=1000, length=length, page_size=16, groups=1)
    lengths = [chunk.length for chunk in limits.full(decodes).chunks]
    assert lengths[:decodes] == [1] * decodes and max(lengths) <= length
    assert sum(lengths) == limits.tokens and len(lengths) <= limits.sequences

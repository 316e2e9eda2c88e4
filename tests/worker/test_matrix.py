"""The same request gives the same bits: every legal mode, chunking, pool, cache and company, dense and with experts.

So it does with drafts, true and false ones. A run steps the real scheduler and runner and keeps the logits of each
position that one request sampled from; all of them are compared bitwise with those of the request alone in the default
mode.
"""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import worker.run.runner
from frontend.text.grammar_builder import json_schema
from shared.config import WorkerConfig
from shared.default_sizes import with_default_sizes
from shared.gguf.translated import translated
from shared.messages import Sampling
from tests.checkpoints import EOS, GEMMA4, HYBRID, VOCAB, Checkpoints
from tests.gguf_files import mixed, write
from tests.worker.kernels.harness.cpu_tiers import HERE, MOST, TIERS, tier  # noqa: F401
from tests.worker.model.expert_checkpoints import in_mxfp4
from tests.worker.model.quantized_checkpoints import FORMATS, rewrite
from tests.worker.run.harness import (
    MAX_SEQ_LEN,
    batch_invariant_decoder,
)
from tests.worker.schedule.harness import OracleDrafter, commit
from worker.grammar.compiler import Grammar, GrammarCompiler
from worker.kernels.cpu import bindings
from worker.kv_cache import window
from worker.kv_cache.groups import cache_groups
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.run.runner import Runner
from worker.run.sampler import sample_rows
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Row, Sequence

PROMPT, NEW, CROWD = 70, 12, 16
CHECKPOINTS = 8  # slots for recurrent states besides those of running sequences: too few for all, so some are evicted
FEW = 5  # others, beside whom there are rows left for drafts
FAMILIES = (  # the last of HYBRID has the layers of the one before it
    "llama", "qwen3", "gemma3", "qwen3-moe", "mixtral", "gpt-oss", "cohere2", *GEMMA4, *HYBRID[:-1],
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
GGUF = ("GGUF Q4_K_M", "llama")  # Q6_K beside Q4_K in one stacked linear
MXFP4_EXPERTS = ("MXFP4 experts", "gpt-oss")
FEW_BITS_BELOW = (
    ("gptq v2, asymmetric, act-order", "llama"), ("awq", "qwen3"), GGUF, ("int4 a group, asymmetric", "qwen3-moe"),
    MXFP4_EXPERTS,
)  # fmt: skip
FEW_BITS = (
    *FEW_BITS_BELOW, ("int8 a row", "gemma3"), ("nf4", "phi3"), ("gptq, act-order", "qwen3-moe"), ("awq", "mixtral"),
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    batching: str = "continuous"
    chunk: int = 512  # 0: off
    page: int = 16  # 0: contiguous
    prefix: bool = True
    company: str = "alone"
    drafts: int = 0  # at most, in a step
    kept: str = "auto"  # --kv-cache-dtype

    def config(self) -> SchedulerConfig:
        worker = WorkerConfig(
            batching_mode=self.batching,
            batch_wait_timeout_s=0.0,
            use_chunked_prefill=bool(self.chunk),
            prefill_chunk_size=self.chunk or 1,
            kv_cache_backend="paged" if self.page else "contiguous",
            prefix_cache=self.prefix,
            speculation="ngram" if self.drafts else "off",
            max_draft_tokens=self.drafts or 7,
            max_step_tokens=256,
            state_checkpoint_tokens=20,
        )
        return SchedulerConfig.of(with_default_sizes(worker, on_gpu=False), MAX_SEQ_LEN, frozenset({EOS}))


def modes() -> Iterator[Mode]:
    batchings = [("continuous", chunk) for chunk in (1, 7, 16, 512, 0)] + [("static", 0)]
    pools = [(page, prefix) for page in (1, 16, 64) for prefix in (True, False)] + [(0, False)]
    for (batching, chunk), (page, prefix) in itertools.product(batchings, pools):
        for company in ("alone", "crowd", "preempted"):
            yield Mode(batching, chunk, page, prefix, company)


def drafting_modes() -> Iterator[Mode]:
    for page, prefix in [(16, True), (64, False), (0, False)]:
        for company, drafts in itertools.product(("alone", "crowd", "preempted"), (1, 3, 7)):
            yield Mode("static" if page == 64 else "continuous", 0, page, prefix, company, drafts)


BELOW = [(which, torch.bfloat16) for which in HERE if which != TIERS[MOST]]  # the full matrix runs at TIERS[MOST]
BELOW += [("avx2", torch.float32)] if TIERS.index("avx2") < MOST else []
MODES, DRAFTING_MODES = list(modes()), list(drafting_modes())


@dataclass
class Recorder:
    """Stands in for the sampling call: keeps one request's rows, then samples as ever."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    agree: bool = True

    def __call__(self, logits: Tensor, rows: list[Row], *how: Any) -> Tensor:
        for row, (sequence, output) in zip(logits, rows, strict=True):
            if sequence.key == (b"target", 0):
                self.rows[output] = row.clone()
        return sample_rows(logits, rows, *how)


def run(
    decoder: Decoder,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
    grammar: Grammar | None = None,
    foretold: list[int] | None = None,
) -> tuple[list[int], dict[int, Tensor]]:
    """The target's output ids and the logits each was sampled from. A grammar is the target's and every other's; of
    what is foretold, and of what is not, its drafts are made."""
    page_size = mode.page or MAX_SEQ_LEN
    pages = 1 + (CROWD + 2) * -(-MAX_SEQ_LEN // page_size)
    dtype = decoder.weights.embed.dtype
    groups = cache_groups(decoder.spec, MAX_SEQ_LEN, paged=mode.page > 0)
    slots = 1 + (CROWD + 2) * 2 + CHECKPOINTS
    kv = KVCache(
        decoder.spec, [pages] * len(groups), page_size, kv_format(mode.kept, dtype), "cpu", groups, slots, dtype
    )
    pools = [PagePool(pages, page_size, group.window) for group in groups]
    states = PagePool(slots, page_size) if kv.states else None
    scheduler = Scheduler(mode.config(), pools, states)
    runner = Runner(fastest_decoder(decoder, kv), kv)
    recorder = Recorder()
    monkeypatch.setattr(worker.run.runner, "sample_rows", recorder)
    target = _sequence(b"target", 0, PROMPT, seed=5)
    others = _crowd(target)[: FEW if mode.drafts else CROWD] if mode.company == "crowd" else []
    target.drafter = OracleDrafter([*target.tokens, *(foretold or [])])
    for sequence in [target, *others[::2]] if grammar else []:
        sequence.constraint = grammar.new_matcher()
    for sequence in [*others[:8], target, *others[8:]]:
        scheduler.submit(sequence, 0.0)
    steps = 0
    while scheduler.has_work:
        if mode.company == "preempted" and steps in (2, 9) and target in scheduler.state.running:
            scheduler.state.preempt(target, float(steps))
        plan = scheduler.plan(float(steps))
        poison(kv, pools, states)
        commit(scheduler, plan, runner.step(plan).ids, float(steps))
        steps += 1
        assert steps < 1000
    scheduler.check()
    if mode.drafts:
        refused = scheduler.status.draft_tokens - scheduler.status.accepted_tokens
        assert scheduler.status.accepted_tokens > 0 and (refused > 0 or mode.drafts == 1), mode
    return target.tokens[PROMPT:], recorder.rows


def poison(kv: KVCache, pools: list[PagePool], states: PagePool | None) -> None:
    """Fills free pages of groups with a window, and the page in place of those behind it, with NaN in every format.

    So it does with free slots of recurrent states.
    """
    for state in kv.states.values() if states else ():
        free = [0, *list(states._spare)[: states.counts().free]]
        state.tail[free], state.memory[free] = torch.nan, torch.nan
    for group, pool in enumerate(pools):
        if pool.window:
            for part in (kv.k[group], kv.v[group]):
                part.view(torch.uint8)[:, [0, *list(pool._spare)[: pool.counts().free]]] = 255


@pytest.fixture(autouse=True)
def return_pages_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels read no key before the first visible one; without this, short sequences return no page."""
    monkeypatch.setattr(window, "KEY_BLOCK", 1)


def assert_same_bits(
    decoder: Decoder, modes: list[Mode], monkeypatch: pytest.MonkeyPatch, grammar: Grammar | None = None
) -> dict[int, Tensor]:
    """Compares every mode with the default one. Returns the logits of the target, by position."""
    ids, logits = run(decoder, Mode(kept=modes[0].kept), monkeypatch, grammar)
    assert len(ids) == NEW
    for mode in modes:
        other_ids, other_logits = run(decoder, mode, monkeypatch, grammar, foretold=None if grammar else ids)
        assert other_ids == ids, mode
        for position, row in logits.items():
            assert torch.equal(other_logits[position], row), (mode, position)
    return logits


def _sequence(owner: bytes, id: int, length: int, seed: int) -> Sequence:
    draw = random.Random(seed)
    tokens = [draw.randrange(3, VOCAB) for _ in range(length)]
    # the target samples, so that its text, too, depends on every bit
    return Sequence((owner, id), tokens, length, Sampling(NEW, temperature=0.8, ignore_eos=True), seed, 0.0)


def _crowd(target: Sequence) -> list[Sequence]:
    """Others of many lengths, some of which begin like the target, so that pages are shared."""
    crowd = [_sequence(b"other", i, 1 + 7 * i % 90, seed=100 + i) for i in range(CROWD)]
    for sequence in crowd[::3]:
        shared = min(sequence.prompt_len, 40)
        sequence.tokens[:shared] = target.tokens[:shared]
    return crowd


THOROUGH = ("llama", "gemma3", "gemma4", "qwen3-moe", "qwen3_5")  # one of each kind of layer, in bf16 in every mode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_the_request_alone(
    family: str, dtype: torch.dtype, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bindings.available(dtype), "the promise rests on the C kernels: is there a C compiler?"
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    modes = MODES[:: 1 if family in THOROUGH and dtype is torch.bfloat16 else 3 if dtype is torch.bfloat16 else 4]
    assert_same_bits(decoder, [*modes, *drafting(DRAFTING_MODES, family)], monkeypatch)


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_the_request_alone_on_every_tier(
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    modes = MODES[7::11] if family in THOROUGH else MODES[7::33]
    assert_same_bits(decoder, [*modes, *drafting(DRAFTING_MODES[2::5], family)], monkeypatch)


def drafting(modes: list[Mode], family: str) -> list[Mode]:
    """Models with recurrent layers run without drafts."""
    return [] if family in HYBRID else modes


def in_eight_bits(kept: str, modes: list[Mode]) -> list[Mode]:
    return [replace(mode, kept=kept) for mode in modes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kept", "family"), [("int8", "llama"), ("fp8", "qwen3"), ("int8", "gemma3"), ("fp8", "gemma4")]
)
def test_bits_of_an_eight_bit_cache_depend_on_the_request_alone(
    kept: str, family: str, dtype: torch.dtype, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    logits = assert_same_bits(decoder, in_eight_bits(kept, [*MODES[::4], *DRAFTING_MODES]), monkeypatch)
    plain = run(decoder, Mode(), monkeypatch)[1]
    assert not torch.equal(logits[0], plain[0]), "eight bits change the logits"


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize(("kept", "family"), [("int8", "gemma3"), ("fp8", "llama")])
def test_bits_of_an_eight_bit_cache_depend_on_the_request_alone_on_every_tier(
    kept: str,
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    assert_same_bits(decoder, in_eight_bits(kept, [*MODES[7::22], *DRAFTING_MODES[2::5]]), monkeypatch)


def decoder_in_few_bits(name: str, folder: Path, dtype: torch.dtype, copy: Path) -> Decoder:
    if name == GGUF[0]:
        copy.mkdir()
        return batch_invariant_decoder(translated([write(GGUF[1], copy, mixed).file], copy), dtype)
    shutil.copytree(folder, copy)
    return batch_invariant_decoder(in_mxfp4(copy) if name == MXFP4_EXPERTS[0] else rewrite(copy, FORMATS[name]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "family"), FEW_BITS)
def test_bits_of_few_bits_depend_on_the_request_alone(
    name: str,
    family: str,
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_in_few_bits(name, checkpoints(family), dtype, tmp_path / "copy")
    modes = MODES[::3] if dtype is torch.bfloat16 else MODES[1::9]
    assert_same_bits(decoder, [*modes, *DRAFTING_MODES[::2]], monkeypatch)


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize(("name", "family"), FEW_BITS_BELOW)
def test_bits_of_few_bits_depend_on_the_request_alone_on_every_tier(
    name: str,
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_in_few_bits(name, checkpoints(family), dtype, tmp_path / "copy")
    assert_same_bits(decoder, [*MODES[7::22], *DRAFTING_MODES[2::5]], monkeypatch)


def test_bits_of_a_grammar_depend_on_the_request_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama")
    decoder = batch_invariant_decoder(folder, torch.float32)
    compiler = GrammarCompiler(folder, VOCAB, (EOS,))
    grammar = compiler.compile(json_schema({"type": "string", "minLength": 100}, "x")).result()
    logits = assert_same_bits(decoder, MODES[::5], monkeypatch, grammar)
    assert all(row.isneginf().any() for row in logits.values())
    compiler.close()

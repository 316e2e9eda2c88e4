"""Runs one request in many modes of batching, chunking, pages, company and drafts, and compares its bits.

A run steps the real scheduler and runner and keeps the logits of each position that one request sampled from. The
request may be of any kind: with penalties, a chain of samplers, token rules, log-probabilities or a grammar.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from frontend.output_parser.model_format import THINK, Reasoning, ToolChoice, ToolFormat
from frontend.output_parser.model_format import Mode as CallMode
from frontend.output_parser.tool_syntax import specials_of
from frontend.structured_output.grammar import json_schema, regex
from frontend.structured_output.tool_grammar import output_grammar
from shared import messages as m
from shared.config.worker import WorkerConfig, with_default_sizes
from shared.messages import Sampling, ThinkingBudget
from shared.messages.requests import Dry, SamplerChain, WindowPenalties
from tests.checkpoints import EOS
from tests.frontend.output_parser.examples import FUNCTIONS
from tests.worker.model_runner.harness import MAX_SEQ_LEN
from tests.worker.scheduler.harness import OracleDrafter, commit, set_drafter
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, cache_groups, kv_format
from worker.model_runner import runner as runner_module
from worker.model_runner.hidden_states import CapturedStates, HiddenStates, ReadStep, read_step
from worker.model_runner.runner import Runner
from worker.model_runner.sampler import sample_rows
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import Forward, ForwardInputs
from worker.scheduler.host_budget import host_work
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Ids, Plan, Row, Sequence, begin, logits_processing
from worker.structured_output.compiler import Grammar
from worker.structured_output.matcher import Restriction
from worker.structured_output.pending import constrain

PROMPT, NEW, CROWD = 70, 12, 16
CHECKPOINTS = 8  # slots for recurrent states that no running sequence needs: so few that some states are evicted
FEW = 5  # number of other sequences: so few that a step has rows left for drafts


@dataclass(frozen=True)
class Mode:
    batching: str = "continuous"
    chunk: int = 512  # prefill chunk size; 0: off
    page: int = 16  # page size; 0: each sequence is contiguous
    prefix: bool = True
    company: str = "alone"
    drafts: int = 0  # most drafts of a sequence in a step
    kept: str = "auto"  # value of --kv-cache-dtype
    # layers whose outputs a drafting head reads; (): the head reads the output of the last norm; None: no head
    reads: tuple[int, ...] | None = None

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


MODES, DRAFTING_MODES = list(modes()), list(drafting_modes())
# Modes that cover each pair of values of batching, pool and company. Each half covers every company with each value
# of the other two.
PAIRS = [MODES[3 * meeting + (meeting // 7 + meeting) % 3] for meeting in range(42)]
HALVES = PAIRS[::2], PAIRS[1::2]
# Modes that cover each pair of values of pool, company and number of drafts.
DRAFTING_PAIRS = [DRAFTING_MODES[3 * meeting + (meeting // 3 + meeting) % 3] for meeting in range(9)]


@dataclass(frozen=True)
class Kind:
    """A kind of request. sampling: options besides those of every request; new: its most tokens; drafts: whether it may
    have drafts."""

    sampling: dict[str, Any] = field(default_factory=dict)
    grammar: str = ""
    new: int = NEW
    drafts: bool = True


SCHEMA = {
    "type": "object", "required": ["id", "kind", "name"], "additionalProperties": False,
    "properties": {
        "id": {"type": "integer"}, "kind": {"enum": ["directory", "regular file"]}, "name": {"type": "string"},
    },
}  # fmt: skip
THOUGHT = ThinkingBudget(4, (30,), 31, (31, 32, 33), begun=True, forbidden=((35, 36),))
CHAIN = SamplerChain(
    ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
    temperature=0.9, dynatemp_range=0.2, top_k=60, top_p=0.98, min_p=0.01, typical_p=0.99, top_n_sigma=3.0,
    xtc_probability=0.4, xtc_threshold=0.05, min_keep=2, penalties=WindowPenalties(32, 1.2, 0.1, 0.2),
    dry=Dry(0.8, 1.75, 1, -1),
)  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.4, "min_tokens": 6, "logprobs": 3,
    "logit_bias": ((40, 3.0), (41, -100.0), (42, 4.0)), "stop_token_ids": (42, 43), "ignore_eos": False,
    "bad_words": ((44,), (45, 46)),
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "penalties": Kind({"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.4}),
    "bias and min_tokens": Kind({"logit_bias": ((2, 9.0), (40, 3.0), (41, -100.0)), "min_tokens": 5,
                                 "stop_token_ids": (42,), "ignore_eos": False}),
    "log-probabilities": Kind({"logprobs": 5}),
    "log-probabilities of greedy tokens": Kind({"logprobs": 0, "temperature": 0.0}),
    "token rules": Kind({"allowed_token_ids": tuple(range(30, 60)), "bad_words": ((31,), (40, 41), (50,))}),
    "reasoning budget": Kind({"thinking": THOUGHT}, new=20),
    "chain of samplers": Kind({"chain": CHAIN}),
    "chain of samplers that reports": Kind({"chain": msgspec.structs.replace(CHAIN, reports=True), "logprobs": 4}),
    "mirostat": Kind({"chain": SamplerChain((), mirostat=2, mirostat_tau=3.0)}, drafts=False),
    "everything": Kind(EVERYTHING, new=16),
    "regex": Kind({"logprobs": 2}, regex("[a-f]{3}-(yes|no|perhaps)( [0-9]{2})*", "x"), new=24),
    "schema": Kind(EVERYTHING, json_schema(SCHEMA, "x"), new=40),
    "schema and reasoning budget": Kind({"thinking": THOUGHT, "temperature": 0.0},
                                        json_schema({"type": "string", "minLength": 30}, "x"), new=30),
}  # fmt: skip


def kind_of_tools(tool_format: ToolFormat) -> Kind:
    """Returns a request that must call a tool. Some tokens of the vocabulary stand for the format's special tokens."""
    words = [word for word in specials_of(tool_format, THINK) if word[0] in "<[" and word[-1] in ">]" and len(word) > 3]
    known = {word: 3 + at for at, word in enumerate(dict.fromkeys(words)) if "NAME" not in word}
    choice = ToolChoice(FUNCTIONS, CallMode.REQUIRED, frozenset(one.name for one in FUNCTIONS), True)
    grammar = output_grammar(choice, tool_format, Reasoning.DONE, specials=known, tags=THINK)
    return Kind({"logprobs": 1}, grammar, new=48)


@dataclass
class Recorder:
    """Replaces the sampling call: records the logits of one request, then samples as usual."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    agree: bool = True

    def __call__(self, logits: Tensor, rows: list[Row], *how: Any) -> Tensor:
        for row, (sequence, output, _) in zip(logits, rows, strict=True):
            if sequence.key == (b"target", 0):
                self.rows[output] = row.clone()
        return sample_rows(logits, rows, *how)


class Reading:
    """Replaces a head that proposes drafts: reads hidden states, and does nothing with them. See Reader."""

    def __init__(self, states: HiddenStates, device: torch.device) -> None:
        self.states = states
        self.of_graphs = CapturedStates(states, MAX_SEQ_LEN * CROWD, device, lambda kept: kept, states.width)

    def reads(self, inputs: ForwardInputs, plan: Plan) -> ReadStep:
        return read_step(inputs, plan, self.states, self.nothing)

    def captured(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.of_graphs.logits(model, inputs, cache)

    def replayed(self, plan: Plan) -> None:
        self.of_graphs.read(plan, self.nothing)

    def nothing(self, sequence: Sequence, start: int, states: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Answer:
    """What one request was answered.

    logits: those that each id was sampled from, by position. scores: the log-probabilities that are sent, by position
    """

    ids: list[int]
    logits: dict[int, Tensor]
    scores: dict[int, m.Logprobs]
    outcome: m.Outcome | None
    error: str  # of the constraint


class PlausibleDrafter(OracleDrafter):
    """Proposes the next tokens of `tokens`; in place of a quarter of them, any id that the constraint allows there."""

    def __init__(self, tokens: list[int], sequence: Sequence, vocab: int) -> None:
        super().__init__(tokens)
        self._sequence, self._vocab, self._draw = sequence, vocab, random.Random(len(tokens))

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        drafts: list[int] = []
        for place in range(len(tokens) + len(ahead), len(tokens) + len(ahead) + limit):
            known = place < len(self._tokens) and self._draw.random() < 0.75
            drafts.append(self._tokens[place] if known else self._draw.choice(self._allowed((*ahead, *drafts))))
        return tuple(drafts)

    def _allowed(self, after: Ids) -> list[int]:
        bits = np.full((self._vocab + 31) // 32 * 4, 255, np.uint8)
        if self._sequence.constraint is not None:
            state = cast(Restriction, self._sequence.constraint).after(after)[0]
            if state.state is not None:
                state.state.unsafe_compute_mask_ptr(bits.ctypes.data, len(bits))
            state.narrow(bits)
        ids: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocab]).tolist()
        return ids or [0]


def run(
    decoder: Decoder,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
    grammar: Grammar | None = None,
    foretold: list[int] | None = None,
    *,
    graphs: bool = False,
) -> tuple[list[int], dict[int, Tensor]]:
    """Returns the target's output ids, and the logits from which each id was sampled. For the arguments, see answer."""
    found = answer(decoder, mode, monkeypatch, grammar, foretold, graphs=graphs)
    return found.ids, found.logits


def answer(
    decoder: Decoder,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
    grammar: Grammar | None = None,
    foretold: list[int] | None = None,
    *,
    graphs: bool = False,
    kind: Kind | None = None,
) -> Answer:
    """Returns what the target is answered.

    grammar: of the target and of every second other sequence. foretold: the output that drafts are taken from
    """
    page_size = mode.page or MAX_SEQ_LEN
    pages = 1 + (CROWD + 2) * -(-MAX_SEQ_LEN // page_size)
    dtype = decoder.weights.embed.dtype
    groups = cache_groups(decoder.spec, MAX_SEQ_LEN, paged=mode.page > 0)
    slots = 1 + (CROWD + 2) * 2 + CHECKPOINTS
    kv = KVCache(
        decoder.spec,
        [pages] * len(groups),
        page_size,
        kv_format(mode.kept, dtype),
        decoder.weights.embed.device,
        groups,
        slots,
        dtype,
    )
    pools = [PagePool(pages, page_size, group.window) for group in groups]
    states = PagePool(slots, page_size) if kv.states else None
    scheduler = Scheduler(mode.config(), pools, states)
    runner = Runner(fastest_decoder(decoder, kv), kv, graphs=graphs)
    if mode.reads is not None:
        runner.hidden_reader = Reading(HiddenStates(mode.reads, decoder.spec.hidden_size, dtype), kv.device)
    recorder = Recorder()
    monkeypatch.setattr(runner_module, "sample_rows", recorder)
    target = _sequence(b"target", 0, PROMPT, 5, decoder.spec.vocab_size)
    others = _crowd(target, decoder.spec.vocab_size)[: FEW if mode.drafts else CROWD] if mode.company == "crowd" else []
    for sequence in [target, *others[::2]] if grammar or kind else []:
        become(sequence, kind or Kind(), grammar)
    text = [*target.tokens, *(foretold or [])]
    drafter = OracleDrafter(text) if kind is None else PlausibleDrafter(text, target, decoder.spec.vocab_size)
    set_drafter(scheduler, target, drafter)
    scores: dict[int, m.Logprobs] = {}
    outcome = None
    for sequence in [*others[:8], target, *others[8:]]:
        scheduler.submit(sequence, 0.0)
    steps = 0
    while scheduler.has_work:
        if mode.company == "preempted" and steps in (2, 9) and target in scheduler.state.running:
            scheduler.state.preempt(target, float(steps))
        plan = scheduler.plan(float(steps))
        poison(kv, pools, states)
        output = runner.step(plan)
        for update in commit(scheduler, plan, output.ids, float(steps)):
            outcome = update.outcome if update.sequence is target else outcome
        for sequence, message in output.logprobs:
            if sequence is target and message.start < target.output_len:  # as TrackedRequest.expects has it
                scores.setdefault(message.start, message)
        steps += 1
        assert steps < 1000
    scheduler.check()
    if mode.drafts and kind is None:
        refused = scheduler.status.draft_tokens - scheduler.status.accepted_tokens
        assert scheduler.status.accepted_tokens > 0 and (refused > 0 or mode.drafts == 1), mode
    if mode.drafts and kind is not None:
        assert (target.history.drafted > 0) == kind.drafts, mode
    error = target.constraint.error if target.constraint is not None else ""
    return Answer(target.tokens[PROMPT:], recorder.rows, scores, outcome, error)


def become(sequence: Sequence, kind: Kind, grammar: Grammar | None) -> None:
    """Makes a new sequence a request of this kind, as engine/requests.py does."""
    options = {"max_tokens": min(kind.new, MAX_SEQ_LEN - sequence.prompt_len), **kind.sampling}
    sequence.sampling = msgspec.structs.replace(sequence.sampling, **options)
    sequence.logits_processing = logits_processing(sequence.sampling, sequence.prompt_len)
    sequence.host = host_work(sequence.sampling)
    if sequence.sampling.chain is not None and sequence.sampling.chain.mirostat:
        begin(sequence)
    assert not constrain(sequence, grammar and grammar.new_matcher())


def poison(kv: KVCache, pools: list[PagePool], states: PagePool | None) -> None:
    """Fills free pages of groups with a window, and free slots of recurrent states, with NaN in every format.

    The scratch page, which replaces pages behind a window, and the scratch slot are filled, too.
    """
    for state in kv.states.values() if states else ():
        free = [0, *list(states._spare)[: states.counts().free]]
        state.tail[free], state.memory[free] = torch.nan, torch.nan
    for group, pool in enumerate(pools):
        if pool.window:
            for part in (kv.k[group], kv.v[group]):
                part.view(torch.uint8)[:, [0, *list(pool._spare)[: pool.counts().free]]] = 255


def assert_same_bits(
    decoder: Decoder, modes: list[Mode], monkeypatch: pytest.MonkeyPatch, grammar: Grammar | None = None
) -> dict[int, Tensor]:
    """Compares every mode with the default mode. Returns the logits of the target, by position."""
    ids, logits = run(decoder, Mode(kept=modes[0].kept), monkeypatch, grammar)
    assert len(ids) == NEW
    for mode in modes:
        other_ids, other_logits = run(decoder, mode, monkeypatch, grammar, foretold=None if grammar else ids)
        assert other_ids == ids, mode
        for position, row in logits.items():
            assert torch.equal(other_logits[position], row), (mode, position)
    return logits


def assert_same_answers(
    decoder: Decoder, modes: list[Mode], monkeypatch: pytest.MonkeyPatch, kind: Kind, grammar: Grammar | None
) -> Answer:
    """Compares every mode with the default mode. Returns the answer of the default mode."""
    plain = answer(decoder, Mode(), monkeypatch, grammar, kind=kind)
    assert len(plain.ids) > 3 and len(plain.scores) == (len(plain.ids) if "logprobs" in kind.sampling else 0)
    for mode in modes:
        other = answer(decoder, mode, monkeypatch, grammar, plain.ids, kind=kind)
        assert (other.ids, other.outcome, other.error) == (plain.ids, plain.outcome, plain.error), mode
        assert other.scores == plain.scores, mode
        for position, row in plain.logits.items():
            assert torch.equal(other.logits[position], row), (mode, position)
    return plain


def _sequence(owner: bytes, id: int, length: int, seed: int, vocab: int) -> Sequence:
    draw = random.Random(seed)
    tokens = [draw.randrange(3, vocab) for _ in range(length)]
    # the target is sampled, so that its ids depend on every bit
    return Sequence((owner, id), tokens, length, Sampling(NEW, temperature=0.8, ignore_eos=True), seed)


def _crowd(target: Sequence, vocab: int) -> list[Sequence]:
    """Returns sequences of many lengths, some of which share pages with the target."""
    crowd = [_sequence(b"other", i, 1 + 7 * i % 90, 100 + i, vocab) for i in range(CROWD)]
    for sequence in crowd[::3]:
        shared = min(sequence.prompt_len, 40)
        sequence.tokens[:shared] = target.tokens[:shared]
    return crowd

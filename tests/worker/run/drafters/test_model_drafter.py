"""A draft model: its drafts are what its own greedy or seeded text would be, and they change no token of an answer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import Sampling
from tests.checkpoints import EOS, VOCAB, Checkpoints
from tests.worker.run.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.schedule.harness import commit
from worker.kv_cache.groups import cache_groups
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.run.drafters.model_drafter import CATCH_UP, ModelDrafter
from worker.run.runner import Runner
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Sequence

SAMPLINGS = (
    Sampling(30, temperature=0.0, ignore_eos=True),
    Sampling(30, temperature=0.9, top_k=40, ignore_eos=True),
    Sampling(30, temperature=1.0, logit_bias=((7, 3.0),), ignore_eos=True),
    Sampling(9, temperature=0.0, repetition_penalty=1.3),
    Sampling(30, temperature=0.7, min_tokens=9),
)


def drafter_of(folder: Path, pool_bytes: int = 1 << 30, longest: int = MAX_SEQ_LEN) -> ModelDrafter:
    target = batch_invariant_decoder(folder, torch.float32)
    decoder = Decoder(target.spec, target.weights, MAX_SEQ_LEN)  # which becomes the drafter's own
    return ModelDrafter(decoder, longest, pool_bytes)


def sequences() -> list[Sequence]:
    draw = random.Random(8)
    made = []
    for at, sampling in enumerate(SAMPLINGS):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 60))]
        made.append(Sequence((b"frontend", at), prompt, len(prompt), sampling, 40 + at))
    return made


def served(folder: Path, drafter: ModelDrafter | None, **settings: Any) -> tuple[list[list[int]], Scheduler, int]:
    """Returns the tokens of all sequences, the scheduler, and the number of steps."""
    decoder = batch_invariant_decoder(folder, torch.float32)
    groups = cache_groups(decoder.spec, MAX_SEQ_LEN, paged=True)
    cache = KVCache(decoder.spec, [60] * len(groups), 16, torch.float32, "cpu", groups, 40, torch.float32)
    pools = [PagePool(60, 16, group.window) for group in groups]
    slots = PagePool(40, 16) if cache.states else None
    config = SchedulerConfig(
        max_seq_len=MAX_SEQ_LEN, eos_token_ids=frozenset({EOS}), max_draft_tokens=4 if drafter else 0, **settings
    )
    scheduler = Scheduler(config, pools, slots)
    if scheduler.speculation is not None:
        scheduler.speculation.proposer = drafter
    runner, every, steps = Runner(fastest_decoder(decoder, cache), cache), sequences(), 0
    for sequence in every:
        scheduler.submit(sequence, 0.0)
    while scheduler.has_work:
        if steps in (9, 14):
            scheduler.state.preempt(next(iter(scheduler.state.running)), 0.0)
        plan = scheduler.plan(0.0)
        commit(scheduler, plan, runner.step(plan).ids, 0.0)
        steps += 1
        assert steps < 400
    scheduler.check()
    return [sequence.tokens for sequence in every], scheduler, steps


@pytest.mark.parametrize(
    ("target", "draft"),
    [("llama", "llama"), ("llama", "qwen3"), ("qwen3", "qwen3_5"), ("qwen3_5", "qwen3_5"), ("gemma3", "gemma3")],
)
def test_drafts_of_a_model_change_no_token(target: str, draft: str, checkpoints: Checkpoints) -> None:
    plain, _, most = served(checkpoints(target), None)
    drafter = drafter_of(checkpoints(draft))
    tokens, scheduler, steps = served(checkpoints(target), drafter)
    assert tokens == plain
    status = scheduler.status
    assert status.draft_tokens > 20 and len(drafter.sequences) == 0, "and everything is taken back"
    if target == draft:  # also the seeded draws are foretold, except that a penalty has no drafts
        assert status.accepted_tokens == status.draft_tokens and steps < 0.7 * most


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_drafts_are_the_models_own_text_whatever_was_rejected(kind: str, checkpoints: Checkpoints) -> None:
    """After right and wrong drafts, it proposes what a drafter proposes that sees the tokens for the first time."""
    drafter, draw = drafter_of(checkpoints(kind)), random.Random(3)
    made = sequences()[:3]
    for sequence in made:
        sequence.tokens += [5]
    for _ in range(6):
        wanted = [(sequence, draw.randint(1, 5)) for sequence in made]
        drafts = drafter.propose(wanted)
        assert drafts == drafter_of(checkpoints(kind)).propose(wanted)
        assert [len(each) for each in drafts] == [count for _, count in wanted]
        for sequence, each in zip(made, drafts, strict=True):
            sequence.tokens += [*each[: draw.randint(0, len(each))], draw.randrange(3, VOCAB)]
    for sequence in made:
        drafter.forget(sequence)
        drafter.forget(sequence)
    assert len(drafter.sequences) == 0


def test_long_prompt_is_read_in_parts_and_delays_no_other_sequence(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.run.drafters.model_drafter.CATCH_UP", 20)
    drafter, (first, second) = drafter_of(checkpoints("llama")), sequences()[:2]
    first.tokens, second.tokens = [9] * 50, [8, 7, 6]
    counts = [[len(drafts) for drafts in drafter.propose([(first, 2), (second, 2)])] for _ in range(4)]
    assert counts == [[0, 2], [0, 2], [2, 2], [2, 2]] and CATCH_UP > 20


def test_sequences_without_room_or_beyond_the_model_have_no_drafts(checkpoints: Checkpoints) -> None:
    drafter, made = drafter_of(checkpoints("llama"), pool_bytes=0, longest=64), sequences()
    made[0].tokens, made[1].tokens, made[2].tokens = [9] * 50, [8] * 20, [7] * 61
    wanted = [(sequence, 4) for sequence in made[:3]]
    assert [len(drafts) for drafts in drafter.propose(wanted)] == [4, 0, 0]
    drafter.forget(made[0])
    assert [len(drafts) for drafts in drafter.propose(wanted[1:])] == [4, 0]


def test_model_that_fails_drafts_no_more_and_fails_no_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama")
    plain, _, _ = served(folder, None)
    drafter, calls = drafter_of(folder), []

    def failing(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("unlucky")

    monkeypatch.setattr(drafter, "_sample", failing)
    assert served(folder, drafter)[0] == plain and len(calls) == 1

"""Serves sequences with a drafter that runs a model, as a worker does, and returns their tokens."""

import random
from pathlib import Path
from typing import Any

import torch

from shared.messages import Sampling
from tests.checkpoints import EOS, VOCAB
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.scheduler.harness import commit
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner.hidden_states import Reader
from worker.model_runner.runner import Runner
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.scheduler.drafts import Proposer
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Plan, Sequence

SAMPLINGS = (
    Sampling(30, temperature=0.0, ignore_eos=True),
    Sampling(30, temperature=0.9, top_k=40, ignore_eos=True),
    Sampling(30, temperature=1.0, logit_bias=((7, 3.0),), ignore_eos=True),
    Sampling(9, temperature=0.0, repetition_penalty=1.3),
    Sampling(30, temperature=0.7, min_tokens=9),
)


def sequences() -> list[Sequence]:
    draw = random.Random(8)
    made = []
    for at, sampling in enumerate(SAMPLINGS):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 60))]
        made.append(Sequence((b"frontend", at), prompt, len(prompt), sampling, 40 + at))
    return made


def only_replays(runner: Runner) -> None:
    """Makes a step without a graph fail, also if the self-test of graphs turns them off."""

    def no_inputs(plan: Plan, before: object) -> None:
        raise AssertionError(f"a step of {plan.tokens} tokens is not replayed")

    runner._inputs = no_inputs  # type: ignore[assignment, method-assign]


def served(
    folder: Path,
    drafter: Proposer | None,
    reader: Reader | None = None,
    *,
    graphs: bool = False,
    decoder: Decoder | None = None,
    **settings: Any,
) -> tuple[list[list[int]], Scheduler, int]:
    """Returns the tokens of all sequences, the scheduler, and the number of steps.

    reader: becomes the runner's `hidden_reader`. graphs: whether steps are replayed, which no step may refuse then.
    decoder: of the model in `folder`; None: one on the CPU
    """
    decoder = decoder or batch_invariant_decoder(folder, torch.float32)
    groups, embed = cache_groups(decoder.spec, MAX_SEQ_LEN, paged=True), decoder.weights.embed
    cache = KVCache(decoder.spec, [60] * len(groups), 16, embed.dtype, embed.device, groups, 40, embed.dtype)
    pools = [PagePool(60, 16, group.window) for group in groups]
    slots = PagePool(40, 16) if cache.states else None
    config = SchedulerConfig(
        max_seq_len=MAX_SEQ_LEN, eos_token_ids=frozenset({EOS}), max_draft_tokens=4 if drafter else 0, **settings
    )
    scheduler = Scheduler(config, pools, slots)
    if scheduler.speculation is not None:
        scheduler.speculation.proposer = drafter
    runner, every, steps = Runner(fastest_decoder(decoder, cache), cache, graphs=graphs), sequences(), 0
    runner.hidden_reader = reader
    if graphs:
        only_replays(runner)
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

"""The loop over processes that are stages of a model: several steps in flight, and the bytes of one process."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.engine.test_loop_answers import KINDS, checking, submits
from tests.worker.model_runner.harness import OTHERS, PLAIN, DrainedBench, scores, traffic
from tests.worker.ops.harness.cpu_tiers import needs_library
from tests.worker.scheduler.harness import OracleDrafter
from worker.engine.build import Engine, load_engine
from worker.kv_cache.pages import PagePool
from worker.scheduler.drafts import Drafter
from worker.scheduler.sequence import Plan, Sequence

pytestmark = needs_library
Engines = Callable[..., Engine]
MIXED = PLAIN + OTHERS + PLAIN


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> Iterator[Engines]:
    """Returns a function that loads an engine; each is loaded once."""

    @cache
    def loaded(kind: str, stages: int, **more: str) -> Engine:
        worker = WorkerConfig(
            device="cpu", dtype="float32", kv_cache_gb=0.02, page_size=16, threads=2, pipeline_parallel_size=stages,
            state_checkpoint_tokens=20, **more,
        )  # fmt: skip
        return load_engine(ModelConfig(model=str(checkpoints(kind)), max_seq_len=128), worker)

    yield loaded  # the other ranks end with this process
    loaded.cache_clear()


class StagedBench(DrainedBench):
    """A loop over the runner of an engine."""

    def __init__(self, engine: Engine, pages: int = 0, chunk: int = 32) -> None:
        """pages: of each group of layers; 0: those of the engine. chunk: the most tokens of a sequence in a step"""
        config = replace(engine.scheduler.config, max_step_tokens=64, prefill_chunk_size=chunk)
        pools = [PagePool(pages or pool.usable + 1, 16, pool.window) for pool in engine.pools]
        super().__init__(
            runner=engine.runner, config=config, pools=pools, slots=engine.size.slots(), vocab_size=VOCAB,
            compiler=engine.compiler,
        )  # fmt: skip
        self.plans: list[list[int]] = []  # the ids of the sequences of each step
        self.shared = 0  # how many steps had a sequence with a step in flight whose id is not known
        self._plan, self.scheduler.plan = self.scheduler.plan, self._noted  # type: ignore[method-assign]

    def _noted(self, now: float) -> Plan:
        plan = self._plan(now)
        self.plans += [[chunk.sequence.key[1] for chunk in plan.chunks]] if plan else []
        self.shared += any(chunk.sequence.pending_outputs for chunk in plan.chunks)
        return plan


def served(bench: StagedBench, requests: list[m.Submit]) -> dict[int, tuple[list[int], m.Outcome]]:
    """Returns output and outcome of each request. Waits for grammars, which are compiled in another thread.

    A request that was sent before is not sent again.
    """
    if not bench.plans:
        bench.send(*requests)
    bench.drain()
    outputs, ends = bench.received()
    return {one.id: (outputs.get(one.id, []), ends[one.id].outcome) for one in requests}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_steps_in_flight_change_no_bit(engines: Engines, kind: str, stages: int) -> None:
    """Prompts of one chunk and more, decodes, both together, penalties and log-probabilities."""
    one, several = StagedBench(engines(kind, 1)), StagedBench(engines(kind, stages))
    for bench in (one, several):
        traffic(bench, MIXED)
    assert one.max_in_flight == 0 and several.max_in_flight == stages - 1 and not several.shared
    assert several.received()[0] == one.received()[0] and scores(several) == scores(one)
    ends = [{id: (end.outcome, end.tokens) for id, end in bench.received()[1].items()} for bench in (one, several)]
    assert ends[0] == ends[1] and len(ends[0]) == len(MIXED)
    assert several.scheduler.status.prefill_tokens == one.scheduler.status.prefill_tokens


@pytest.mark.parametrize("stages", [2, 3])
def test_answer_of_every_kind_has_the_bytes_of_one_process(engines: Engines, stages: int) -> None:
    """Also with a grammar or a chain of samplers; and a prefill that checks the answers accepts them."""
    expected = served(StagedBench(engines("llama", 1)), submits())
    bench = StagedBench(engines("llama", stages))
    assert served(bench, submits()) == expected and bench.max_in_flight == stages - 1
    checks = [checking(submit, expected[submit.id][0]) for submit in submits()]
    for chunk in (32, 5):
        assert served(StagedBench(engines("llama", stages), chunk=chunk), checks) == expected, KINDS.keys()


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_drafts_change_no_bit(engines: Engines, kind: str) -> None:
    sampling = m.Sampling(60, temperature=0.8, seed=3, ignore_eos=True)
    requests = [m.Submit(id, pack_u32([5 + id, 6, 7]), sampling) for id in range(5)]
    expected = served(StagedBench(engines(kind, 1)), requests)
    bench = StagedBench(engines(kind, 2, speculation="ngram"))
    speculation = bench.scheduler.speculation
    assert speculation is not None

    def drafter(sequence: Sequence) -> Drafter:
        return OracleDrafter([*sequence.tokens[: sequence.prompt_len], *expected[sequence.key[1]][0]])

    speculation._new_drafter = drafter  # type: ignore[method-assign]
    assert served(bench, requests) == expected and bench.max_in_flight == 1
    assert 20 < speculation.accepted_tokens < speculation.draft_tokens


def test_vectors_have_the_bits_of_one_process(engines: Engines) -> None:
    draw, found = random.Random(3), list[dict[int, bytes]]()
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (1, 17, 64, 65, 100)]
    kinds = [m.Pooling(kind) for kind in (m.PoolingKind.LAST, m.PoolingKind.MEAN, m.PoolingKind.FIRST)]
    of_logits = (m.PoolingKind.LOGITS, m.PoolingKind.LOGPROBS)
    poolings = [*kinds, *(m.Pooling(kind, token_ids=(9, 4, 77)) for kind in of_logits)]
    for stages in (1, 3):
        bench = StagedBench(engines("llama", stages))
        for number, (prompt, pooling) in enumerate((prompt, pooling) for prompt in prompts for pooling in poolings):
            bench.send(m.Submit(number, pack_u32(prompt), m.Sampling(0), pooling=pooling))
        bench.drain()
        assert bench.max_in_flight == stages - 1
        found.append({one.id: one.values for _, step in bench.server.sent for one in step.pooled})
    assert found[0] == found[1] and len(found[0]) == len(prompts) * len(poolings)


@pytest.mark.parametrize("stages", [2, 3])
def test_preemptions_of_sequences_in_flight_change_no_bit(engines: Engines, stages: int) -> None:
    """Log-probabilities of an id that a preemption has discarded are not sent."""
    samplings = [m.Sampling(40, temperature=0.9, seed=i, ignore_eos=True, logprobs=1) for i in range(8)]
    roomy, tight = StagedBench(engines("llama", 1)), StagedBench(engines("llama", stages), pages=12)
    for bench in (roomy, tight):
        traffic(bench, samplings)
    assert tight.scheduler.status.preemptions > 2 and tight.max_in_flight == stages - 1
    sampled = [bench.scheduler.status.generation_tokens for bench in (roomy, tight)]
    assert sampled[0] < sampled[1], "some ids in flight were discarded"
    assert tight.received()[0] == roomy.received()[0] and scores(tight) == scores(roomy)
    messages = [sum(len(step.logprobs) for _, step in bench.server.sent) for bench in (roomy, tight)]
    assert messages[0] == messages[1]


def test_requests_that_leave_while_in_flight_get_one_end_and_free_their_pages(engines: Engines) -> None:
    expected = served(StagedBench(engines("llama", 1)), submits())
    bench = StagedBench(engines("llama", 3))
    bench.send(*submits())
    bench.iterate(9)
    assert bench.loop.in_flight == 2
    bench.send(m.Abort((0, 3, 5)))
    bench.drain()
    outputs, ends = bench.received()
    aborted = {id for id, end in ends.items() if end.outcome is m.Outcome.ABORTED}
    assert aborted and aborted <= {0, 3, 5} and len(ends) == len(expected)
    for id, (tokens, outcome) in expected.items():
        assert ends[id].tokens == len(outputs.get(id, []))
        assert outputs.get(id, []) == tokens[: ends[id].tokens] and (id in aborted or ends[id].outcome is outcome)
    assert bench.scheduler.state.paging.pools[0].counts().owned == 0


@pytest.mark.parametrize("stages", [2, 3])
def test_step_that_fails_when_it_is_finished_fails_only_the_culprit(engines: Engines, stages: int) -> None:
    """The steps behind it are discarded, and computed again."""
    expected = served(StagedBench(engines("llama", 1)), submits())
    bench, culprit = StagedBench(engines("llama", stages)), 4
    sample = bench.runner._sample

    def unlucky(logits: object, rows: list[tuple[object, int, object]]) -> object:
        if any(sequence.key[1] == culprit and output == 7 for sequence, output, _ in rows):  # type: ignore[attr-defined]
            raise RuntimeError("unlucky")
        return sample(logits, rows)

    bench.runner._sample = unlucky
    try:
        found = served(bench, submits())
    finally:
        del bench.runner._sample
    assert found.pop(culprit) == (expected[culprit][0][:7], m.Outcome.ERROR)
    assert found == {id: one for id, one in expected.items() if id != culprit}


def test_device_is_checked_while_steps_are_in_flight(engines: Engines) -> None:
    """As when an image cannot be encoded."""
    expected = served(StagedBench(engines("llama", 1)), submits())
    bench = StagedBench(engines("llama", 3))
    bench.send(*submits())
    bench.iterate(5)
    assert bench.loop.in_flight == 2
    bench.runner.check_device()
    assert served(bench, submits()) == expected


def test_sequence_alone_has_one_step_in_flight(engines: Engines) -> None:
    bench = StagedBench(engines("llama", 3))
    bench.send(m.Submit(1, pack_u32([5, 6, 7]), m.Sampling(9, temperature=0.0, ignore_eos=True)))
    bench.drain()
    assert bench.max_in_flight == 1 and bench.plans == [[1]] * 9


def test_chunks_of_a_long_prompt_are_in_flight_together(engines: Engines) -> None:
    bench = StagedBench(engines("llama", 3))
    bench.send(m.Submit(1, pack_u32([*range(3, 103)]), m.Sampling(1)))
    bench.drain()
    assert bench.max_in_flight == 2 and len(bench.plans) == 4

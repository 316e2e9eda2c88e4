"""Vectors of prompts agree with transformers. Neither chunks of prompts nor other requests change their bits."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from shared import messages as m
from shared.wire import pack_u32, unpack_f32
from tests.checkpoints import VOCAB, Checkpoints
from tests.embedders import pooled
from tests.worker.model_runner.harness import RunnerBench, batch_invariant_decoder
from worker.model_runner.logprobs import PromptVector

LAST, MEAN, FIRST, LOGITS = m.PoolingKind.LAST, m.PoolingKind.MEAN, m.PoolingKind.FIRST, m.PoolingKind.LOGITS
NAMES = {LAST: "lasttoken", MEAN: "mean", FIRST: "cls"}
POOLINGS = [m.Pooling(LAST), m.Pooling(MEAN), m.Pooling(FIRST, normalized=False), m.Pooling(MEAN, dimensions=20)]
BY_LOGITS = m.Pooling(LOGITS, token_ids=(9, 4, 77))
BY_LOGPROBS = m.Pooling(m.PoolingKind.LOGPROBS, token_ids=(9, 4, 77))
KINDS = ["qwen3-tied", "llama", "mistral", "gemma3", "qwen3-moe"]


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def embed(id: int, prompt: list[int], pooling: m.Pooling, **more: object) -> m.Submit:
    return m.Submit(id, pack_u32(prompt), m.Sampling(0), pooling=pooling, **more)  # type: ignore[arg-type]


def vectors(bench: RunnerBench) -> dict[int, bytes]:
    found = {one.id: one.values for _, step in bench.server.sent for one in step.pooled}
    _, ends = bench.received()
    assert {id for id, end in ends.items() if end.outcome is m.Outcome.POOLED} == found.keys()
    return found


def decoder(folder: Path) -> RunnerBench:
    return RunnerBench(batch_invariant_decoder(folder, torch.float32))


def states(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    bench, asked = decoder(folder), prompts(1, 17, 64, 65, 100)
    for number, prompt in enumerate(asked):
        bench.send(*(embed(10 * number + at, prompt, pooling) for at, pooling in enumerate(POOLINGS)))
    bench.drain()
    found = vectors(bench)
    for number, prompt in enumerate(asked):
        hidden = states(folder, prompt)
        for at, pooling in enumerate(POOLINGS):
            wanted = pooled(
                hidden, NAMES[pooling.kind], dimensions=pooling.dimensions, normalized=pooling.normalized
            ).double()
            vector = torch.tensor(unpack_f32(found[10 * number + at])).double()
            assert 1 - torch.nn.functional.cosine_similarity(vector, wanted, dim=0) < 1e-6
            assert (vector - wanted).norm() < 2e-5 * wanted.norm()


def test_log_probabilities_are_those_of_all_logits_and_the_most_likely_id_follows(checkpoints: Checkpoints) -> None:
    bench, asked = decoder(checkpoints("llama")), prompts(1, 17, 65)
    every = m.Pooling(LOGITS, token_ids=tuple(range(VOCAB)))
    for number, prompt in enumerate(asked):
        bench.send(embed(2 * number, prompt, every), embed(2 * number + 1, prompt, BY_LOGPROBS))
    bench.drain()
    found = vectors(bench)
    for number in range(len(asked)):
        logits = torch.tensor(unpack_f32(found[2 * number])).double()
        *chosen, best = unpack_f32(found[2 * number + 1])
        assert chosen == pytest.approx(logits.log_softmax(0)[list(BY_LOGPROBS.token_ids)].tolist(), abs=2e-6)
        assert int(best) == int(logits.argmax())


@pytest.mark.parametrize("kind", ["qwen3-tied", "mistral"])
def test_vectors_have_the_same_bits_alone_together_preempted_and_among_answers(
    checkpoints: Checkpoints, kind: str
) -> None:
    asked = [
        (prompt, pooling)
        for prompt in prompts(1, 16, 63, 64, 65, 100)
        for pooling in (*POOLINGS, BY_LOGITS, BY_LOGPROBS)
    ]
    model = batch_invariant_decoder(checkpoints(kind), torch.float32)

    def run(pages: int, *, together: bool, answers: bool) -> tuple[dict[int, bytes], int]:
        bench = RunnerBench(model, pages)
        for id, (prompt, pooling) in enumerate(asked):
            if answers:
                answer = m.Sampling(90, seed=id, ignore_eos=True)
                bench.send(m.Submit(1000 + id, pack_u32(prompt[:15]), answer))
            bench.send(embed(id, prompt, pooling, cache_salt="" if together else str(id)))
            bench.iterate() if together else bench.drain()
        bench.drain()
        return vectors(bench), bench.scheduler.status.preemptions

    alone, _ = run(100, together=False, answers=False)
    assert len(alone) == len(asked)
    assert run(100, together=True, answers=False)[0] == alone
    assert run(100, together=True, answers=True)[0] == alone
    crowded, preemptions = run(24, together=True, answers=True)
    assert crowded == alone and preemptions, "the pool was large enough for all"


def test_only_pooling_of_the_end_takes_pages_from_the_prefix_cache(checkpoints: Checkpoints) -> None:
    bench, (prompt,) = decoder(checkpoints("qwen3-tied")), prompts(100)
    cached = {}
    for id, pooling in enumerate((m.Pooling(LAST), m.Pooling(LAST), BY_LOGITS, m.Pooling(MEAN), m.Pooling(FIRST))):
        bench.send(embed(id, prompt, pooling))
        bench.drain()
        cached[id] = bench.received()[1][id].timings.cached_tokens
    assert cached == {0: 0, 1: 96, 2: 96, 3: 0, 4: 0}
    found = vectors(bench)
    assert found[0] == found[1]


def test_logits_are_those_of_the_ids_asked_for(checkpoints: Checkpoints) -> None:
    bench, (prompt,) = decoder(checkpoints("qwen3-tied")), prompts(70)
    bench.send(embed(0, prompt, BY_LOGITS), m.Submit(1, pack_u32(prompt), m.Sampling(1, temperature=0.0, logprobs=20)))
    bench.drain()
    logits = unpack_f32(vectors(bench)[0])
    (told,) = [one for _, step in bench.server.sent for one in step.logprobs]
    other = embed(2, prompt, m.Pooling(LOGITS, token_ids=tuple(np.frombuffer(told.top_ids, "<u4").tolist())))
    bench.send(other)
    bench.drain()
    ranked = unpack_f32(vectors(bench)[2])
    assert list(ranked) == sorted(ranked, reverse=True) and len(logits) == 3
    differences = np.diff(np.array(ranked)) - np.diff(np.array(unpack_f32(told.top_logprobs)))
    assert np.abs(differences).max() < 1e-5


def test_request_that_wants_a_vector_can_be_aborted_and_sent_again(checkpoints: Checkpoints) -> None:
    bench, (prompt,) = decoder(checkpoints("qwen3-tied")), prompts(120)
    bench.send(embed(1, prompt, m.Pooling(MEAN)))
    bench.iterate()  # computes half of the prompt
    bench.send(m.Abort((1,)))
    bench.drain()
    assert bench.received()[1][1].outcome is m.Outcome.ABORTED and not vectors(bench)
    bench.send(embed(2, prompt, m.Pooling(MEAN)))
    bench.drain()
    before = vectors(bench)[2]
    sent = len(bench.server.sent)
    bench.send(m.Resync(2, 0))
    bench.iterate()
    (repaired,) = [step for _, step in bench.server.sent[sent:]]
    assert [one.values for one in repaired.pooled] == [before] and repaired.ends[0].outcome is m.Outcome.POOLED


def test_vector_that_is_not_finite_is_an_error(checkpoints: Checkpoints) -> None:
    vector = PromptVector(m.Pooling(LAST))
    vector.add(0, np.array([[1.0, np.inf]], np.float32))
    with pytest.raises(ValueError, match="not finite"):
        vector.values()


def test_mean_ignores_rows_of_a_step_that_was_in_flight_when_its_sequence_was_preempted() -> None:
    rows = np.random.default_rng(0).standard_normal((90, 8)).astype(np.float32)
    whole, cut = PromptVector(m.Pooling(MEAN)), PromptVector(m.Pooling(MEAN))
    whole.add(0, rows)
    cut.add(0, rows[:40])
    cut.add(40, rows[40:60])
    cut.add(0, rows[:10])  # the prompt begins again
    cut.add(60, rows[60:])  # rows that come too early
    cut.add(10, rows[10:90])
    assert whole.values() == cut.values()
    assert np.linalg.norm(np.array(unpack_f32(whole.values()))) == pytest.approx(1, abs=1e-6)


def test_zero_vector_stays_zero() -> None:
    vector = PromptVector(m.Pooling(LAST))
    vector.add(3, np.zeros((1, 4), np.float32))
    assert vector.values() == bytes(16)

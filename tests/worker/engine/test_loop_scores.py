"""Scores of text that this server generated equal, bit for bit, the log-probabilities of its decode."""

import random

import msgspec
import pytest
import torch

from shared import messages as m
from shared.wire import pack_u32, unpack_f32, unpack_u32
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import RunnerBench, batch_invariant_decoder

TOP = 3
SAMPLINGS = [
    m.Sampling(40, temperature=0.0, ignore_eos=True, logprobs=TOP),
    m.Sampling(40, temperature=1.0, seed=1, ignore_eos=True, logprobs=TOP),
    m.Sampling(25, temperature=0.8, seed=2, top_p=0.9, repetition_penalty=1.4, ignore_eos=True, logprobs=TOP),
    m.Sampling(25, temperature=1.5, seed=3, logit_bias=((9, 3.0),), min_tokens=20, logprobs=TOP),
]
PROMPTS = [[7], [11] * 33, [*range(3, 40)], [*range(3, 43)]]


def scored(id: int, prompt: list[int], answer: list[int], salt: str = "") -> m.Submit:
    sampling = m.Sampling(0, prompt_logprobs=True, prompt_top=TOP)
    return m.Submit(id, pack_u32(prompt + answer), sampling, cache_salt=salt, scored_from=len(prompt))


def columns(bench: RunnerBench, id: int, start: int) -> tuple[list[float], list[int], list[float]]:
    """Returns log-probabilities, most likely ids and their log-probabilities, sent for the tokens from `start` on."""
    told = [one for _, step in bench.server.sent for one in step.logprobs if one.id == id]
    assert [one.start for one in told] == [
        start + sum(len(before.chosen) // 4 for before in told[:at]) for at in range(len(told))
    ], "no token is told of twice, and none is left out"
    parts = [(unpack_f32(one.chosen), unpack_u32(one.top_ids), unpack_f32(one.top_logprobs)) for one in told]
    chosen, ids, values = ([number for part in column for number in part] for column in zip(*parts, strict=True))
    return chosen, ids, values


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3", torch.bfloat16), ("qwen3_5", torch.float32), ("gemma3", torch.bfloat16)]
)
def test_scores_of_a_generated_text_are_those_of_its_decode(
    kind: str, dtype: torch.dtype, checkpoints: Checkpoints
) -> None:
    decoder = batch_invariant_decoder(checkpoints(kind), dtype)
    first = RunnerBench(decoder)
    first.send(*[m.Submit(at, pack_u32(PROMPTS[at]), sampling) for at, sampling in enumerate(SAMPLINGS)])
    first.drain()
    outputs = {at: [*first.received()[0][at]] for at in range(len(SAMPLINGS))}
    decoded = {at: columns(first, at, 0) for at in outputs}
    assert all(len(chosen) == len(outputs[at]) >= 20 for at, (chosen, _, _) in decoded.items())
    for chunk in (64, 7):
        again = RunnerBench(decoder, chunk=chunk)
        for _ in range(2):  # the second time with a full prefix cache
            again.send(*[scored(at, PROMPTS[at], outputs[at]) for at in outputs])
            again.drain()
            assert {at: columns(again, at, len(PROMPTS[at])) for at in outputs} == decoded
            again.server.sent.clear()
            again.request_table._records.clear()
    assert again.scheduler.status.prefix_hits > 0


def test_answers_of_one_prompt_are_scored_after_a_single_prefill_of_it(checkpoints: Checkpoints) -> None:
    draw = random.Random(5)
    prompt = [draw.randrange(3, VOCAB) for _ in range(70)]
    bench = RunnerBench(batch_invariant_decoder(checkpoints("qwen3"), torch.float32))
    answers = [[draw.randrange(3, VOCAB) for _ in range(5)] for _ in range(6)]
    bench.send(*[msgspec.structs.replace(scored(at, prompt, one), group=1) for at, one in enumerate(answers)])
    bench.drain()
    shared = 64  # whole pages before the row of the prompt's last token
    assert bench.scheduler.status.prefill_tokens == 6 * 75 - 5 * shared
    ends = bench.received()[1]
    assert [ends[at].outcome for at in range(6)] == [m.Outcome.LENGTH] * 6
    assert [ends[at].timings.cached_tokens for at in range(6)] == [0, *[shared] * 5]
    alone = RunnerBench(batch_invariant_decoder(checkpoints("qwen3"), torch.float32))
    alone.send(scored(3, prompt, answers[3]))
    alone.drain()
    assert columns(alone, 3, 70) == columns(bench, 3, 70)

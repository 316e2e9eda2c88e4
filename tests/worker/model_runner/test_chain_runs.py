"""Chains of samplers draw the same tokens alone and beside others, preempted, resumed, checked and after failures."""

import random
from typing import Any

import msgspec
import pytest
import torch

from shared import messages as m
from shared.messages.requests import LongBreaker
from shared.wire import pack_u32, unpack_u32
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import RunnerBench, batch_invariant_decoder
from worker.model_runner.runner import Runner
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Plan

LENGTH = 30


def broken_by(heads: bytes, tail: tuple[int, ...], single: bytes = b"") -> m.Dry:
    return m.Dry(3.0, 1.75, 1, -1, single, (LongBreaker(heads, tail),))


CHAINS: dict[str, m.SamplerChain] = {
    "dry": m.SamplerChain(("dry",), dry=broken_by(pack_u32([7]), (8, 9), single=pack_u32([7]))),
    "xtc": m.SamplerChain(("xtc", "temperature"), xtc_probability=0.5, xtc_threshold=0.01, temperature=2.0),
    "typical": m.SamplerChain(("typ_p", "top_n_sigma"), typical_p=0.7, top_n_sigma=2.0),
    "mirostat 1": m.SamplerChain(("temperature",), temperature=0.9, mirostat=1, mirostat_tau=2.0),
    "mirostat 2": m.SamplerChain((), mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3),
    "window": m.SamplerChain(("penalties", "temperature"), temperature=1.5, penalties=m.WindowPenalties(5, 1.5, 0.3)),
}
PROMPT = [random.Random(4).randrange(3, VOCAB) for _ in range(40)]


def sampling(name: str, **more: Any) -> m.Sampling:
    return m.Sampling(LENGTH, seed=11, chain=CHAINS[name], ignore_eos=True, **more)


@pytest.fixture(scope="module")
def decoder(checkpoints: Checkpoints) -> Decoder:
    return batch_invariant_decoder(checkpoints("llama"), torch.float32)


def outputs(decoder: Decoder, *submits: m.Submit, pages: int = 100, chunk: int = 64) -> dict[int, list[int]]:
    bench = RunnerBench(decoder, pages, chunk=chunk)
    bench.send(*submits)
    bench.drain()
    return bench.received()[0]


def alone(decoder: Decoder, name: str) -> list[int]:
    return outputs(decoder, m.Submit(1, pack_u32(PROMPT), sampling(name)))[1]


@pytest.mark.parametrize("name", CHAINS)
def test_bits_depend_on_the_request_alone(name: str, decoder: Decoder) -> None:
    expected = alone(decoder, name)
    assert len(expected) == LENGTH
    others = [m.Submit(id, pack_u32(PROMPT[id:]), sampling(other)) for id, other in enumerate(CHAINS, 10)]
    plain = m.Submit(2, pack_u32(PROMPT), m.Sampling(LENGTH, seed=3, ignore_eos=True))
    crowd = [*others[:4], m.Submit(1, pack_u32(PROMPT), sampling(name)), plain, *others[4:]]
    together = outputs(decoder, *crowd, chunk=7)
    assert together[1] == expected
    assert together[2] == outputs(decoder, plain)[2], "rows without a chain keep their bits"
    assert outputs(decoder, *crowd, pages=18)[1] == expected, "some are preempted"


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("known", [1, 12, LENGTH - 1])
def test_resumed_stream_goes_on_with_the_same_tokens(name: str, known: int, decoder: Decoder) -> None:
    expected = alone(decoder, name)
    submit = m.Submit(1, pack_u32(PROMPT), sampling(name), generated=pack_u32(expected[:known]))
    bench = RunnerBench(decoder)
    bench.send(submit)
    bench.drain()
    output = expected[:known]
    for _, step in bench.server.sent:
        for start, tokens in runs(step):
            output[start:] = tokens
    assert output == expected
    (end,) = (end for _, step in bench.server.sent for end in step.ends)
    assert (end.outcome, end.tokens) == (m.Outcome.LENGTH, LENGTH)


def runs(step: m.Step) -> list[tuple[int, list[int]]]:
    tokens = iter(unpack_u32(step.tokens))
    return [
        (start, [next(tokens) for _ in range(count)])
        for start, count in zip(unpack_u32(step.starts), unpack_u32(step.counts), strict=True)
    ]


def test_resumed_stream_has_the_same_log_probabilities(decoder: Decoder) -> None:
    def scores(*known: int) -> dict[int, bytes]:
        bench = RunnerBench(decoder)
        asked = sampling("mirostat 2", logprobs=2)
        bench.send(m.Submit(1, pack_u32(PROMPT), asked, generated=pack_u32(known)))
        bench.drain()
        return {one.start: one.chosen for _, step in bench.server.sent for one in step.logprobs}

    expected, resumed = scores(), scores(*alone(decoder, "mirostat 2")[:9])
    assert {at: resumed[at] for at in range(9, LENGTH)} == {at: expected[at] for at in range(9, LENGTH)}


@pytest.mark.parametrize("name", CHAINS)
def test_answer_is_checked_and_a_changed_token_found(name: str, decoder: Decoder) -> None:
    expected = alone(decoder, name)
    asked = m.Submit(1, pack_u32(PROMPT), sampling(name), answer=pack_u32(expected))
    assert outputs(decoder, asked)[1] == expected
    changed = [*expected[:20], (expected[20] + 1) % VOCAB, *expected[21:]]
    asked = m.Submit(1, pack_u32(PROMPT), sampling(name), answer=pack_u32(changed))
    assert outputs(decoder, asked)[1] == expected[:21]


def test_answer_that_goes_on_from_another_is_checked(decoder: Decoder) -> None:
    begun = PROMPT[:6]
    asked = m.Submit(1, pack_u32(PROMPT), sampling("mirostat 2"), generated=pack_u32(begun))
    answer = outputs(decoder, asked)[1]
    assert answer[:6] == begun and len(answer) == LENGTH
    assert outputs(decoder, msgspec.structs.replace(asked, answer=pack_u32(answer)))[1] == answer


@pytest.mark.parametrize("name", ["mirostat 2", "xtc", "dry"])
def test_steps_that_fail_and_are_repeated_change_no_token(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, launch, count = alone(decoder, name), Runner.launch, iter(range(1000))

    def failing(self: Runner, plan: Plan, before: Any = None) -> Any:
        step = launch(self, plan, before)
        if len(plan.chunks) > 1 and next(count) % 3 == 1:
            raise RuntimeError("sampled, and then failed; its sequences are computed alone")
        return step

    monkeypatch.setattr(Runner, "launch", failing)
    submits = [m.Submit(id, pack_u32(PROMPT), sampling(name)) for id in (1, 2)]
    assert outputs(decoder, *submits) == {1: expected, 2: expected}


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": ("top_q",)}, {"order": ("dry",) * 65}, {"typical_p": float("nan")}, {"mirostat": 3}, {"top_k": -1},
        {"mirostat_tau": -1.0}, {"top_n_sigma": float("inf")}, {"penalties": m.WindowPenalties(-2)},
        {"penalties": m.WindowPenalties(5, 0.0)}, {"dry": m.Dry(1.0, 0.5, 2, -1)},
        {"dry": m.Dry(1.0, 1.75, 2, -1, pack_u32([VOCAB]))}, {"dry": m.Dry(1.0, 1.75, 2, -1, b"odd")},
        {"dry": broken_by(pack_u32([1]), (1,) * 65)}, {"dry": broken_by(pack_u32([1]), ())},
        {"dry": broken_by(b"odd", (1,))}, {"dry": broken_by(pack_u32([1] * 70_000), (1,))},
    ],
)  # fmt: skip
def test_worker_refuses_values_that_no_frontend_sends(wrong: dict[str, Any], decoder: Decoder) -> None:
    bench = RunnerBench(decoder)
    bench.send(m.Submit(1, pack_u32(PROMPT), m.Sampling(5, chain=m.SamplerChain(**{"order": (), **wrong}))))
    bench.iterate()
    (rejected,) = (one for _, step in bench.server.sent for one in step.rejected)
    assert rejected.reason is m.Refusal.INVALID

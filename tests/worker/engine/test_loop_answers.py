"""The check of an answer by a prefill samples the same ids as the decode did, for every kind of request."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from frontend.structured_output.grammar import json_schema, regex
from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.checkpoints import EOS, VOCAB, Checkpoints
from tests.worker.model_runner.harness import RunnerBench, batch_invariant_decoder
from tests.worker.test_matrix import FEW_BITS, decoder_in_few_bits
from worker.model_runner.step import InFlightStep
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Plan
from worker.structured_output.compiler import GrammarCompiler

LENGTH = 24
BUDGET = m.ThinkingBudget(4, (7,), 8, (8, 9), begun=True, forbidden=((11, 12),))
KINDS = {
    "greedy": m.Sampling(LENGTH, temperature=0.0, ignore_eos=True),
    "random": m.Sampling(LENGTH, temperature=1.2, seed=4, ignore_eos=True),
    "top_k, top_p and min_p": m.Sampling(LENGTH, temperature=3.0, top_k=50, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    "penalties": m.Sampling(
        LENGTH, temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "greedy with a penalty": m.Sampling(LENGTH, temperature=0.0, repetition_penalty=1.5, ignore_eos=True),
    "logit_bias": m.Sampling(LENGTH, temperature=1.0, seed=9, logit_bias=((7, 4.0), (11, -50.0))),
    "min_tokens": m.Sampling(LENGTH, temperature=2.0, seed=6, min_tokens=7, stop_token_ids=tuple(range(0, VOCAB, 3))),
    "stop_token_ids": m.Sampling(LENGTH, temperature=4.0, seed=7, stop_token_ids=tuple(range(0, VOCAB, 9))),
    "allowed_token_ids and bad_words": m.Sampling(
        LENGTH, temperature=1.5, seed=8, allowed_token_ids=(EOS, 5, 6, 7), bad_words=((5, 6), (7, 7)), min_tokens=3
    ),
    "thinking": m.Sampling(LENGTH, temperature=1.0, seed=11, thinking=BUDGET, ignore_eos=True),
    "a schema": m.Sampling(
        LENGTH, temperature=1.0, seed=12, min_tokens=5,
        grammar=json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, "x"),
    ),
    "a regex with thinking": m.Sampling(
        LENGTH, temperature=1.0, seed=13, grammar=regex("[a-z]{3,9}", "x"), thinking=BUDGET
    ),
    "a chain of samplers": m.Sampling(
        LENGTH, seed=15, ignore_eos=True, chain=m.SamplerChain(
            ("penalties", "dry", "typ_p", "xtc", "temperature"), temperature=1.5, typical_p=0.98, xtc_probability=0.5,
            xtc_threshold=0.02, penalties=m.WindowPenalties(6, 1.3), dry=m.Dry(2.0, 1.75, 1, -1),
        ),
    ),
    "a single token": m.Sampling(1, temperature=1.0, seed=14),
}  # fmt: skip
Answers = dict[int, tuple[m.Submit, list[int], m.End]]


def submits() -> list[m.Submit]:
    """Returns a request of every kind."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 5, 17, 50]))] for _ in KINDS]
    return [
        m.Submit(id, pack_u32(prompt), kind)
        for id, (prompt, kind) in enumerate(zip(prompts, KINDS.values(), strict=True))
    ]


def served(bench: RunnerBench, requests: list[m.Submit], *, preempting: bool = False) -> Answers:
    """Runs the requests together. Returns each request with its output and end.

    preempting: whether the newest sequence is preempted at some steps
    """
    bench.send(*requests)
    for step in range(22):
        bench.iterate()
        if preempting and step in (3, 9, 15, 21) and bench.scheduler.state.running:
            bench.scheduler.state.preempt(next(reversed(bench.scheduler.state.running)), bench.now)
    bench.iterate_until(lambda: len(bench.received()[1]) == len(requests))
    outputs, ends = bench.received()
    return {one.id: (one, outputs.get(one.id, []), ends[one.id]) for one in requests}


def checking(submit: m.Submit, answer: list[int]) -> m.Submit:
    return msgspec.structs.replace(submit, answer=pack_u32(answer))


@pytest.fixture(scope="module")
def compiler(checkpoints: Checkpoints) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(checkpoints("llama"), VOCAB, (EOS,))
    yield compiler
    compiler.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "qwen3_5"])
def test_answer_of_every_kind_is_sampled_again(
    family: str, checkpoints: Checkpoints, compiler: GrammarCompiler
) -> None:
    assert_checked(batch_invariant_decoder(checkpoints(family), torch.bfloat16), compiler)


@pytest.mark.parametrize(("name", "family"), FEW_BITS[1:5:2])
def test_answer_in_few_bits_is_sampled_again(
    name: str, family: str, checkpoints: Checkpoints, compiler: GrammarCompiler, tmp_path: Path
) -> None:
    assert_checked(decoder_in_few_bits(name, checkpoints(family), torch.bfloat16, tmp_path / "copy"), compiler)


def assert_checked(decoder: Decoder, compiler: GrammarCompiler) -> int:
    """Checks answers of every kind, whole in a chunk, and in small chunks with preemptions.

    Returns the number of answers.
    """
    answers = served(RunnerBench(decoder, compiler=compiler), submits())
    assert {end.outcome for *_, end in answers.values()} == {m.Outcome.EOS, m.Outcome.STOP, m.Outcome.LENGTH}
    for chunk in (64, 5):
        bench = RunnerBench(decoder, compiler=compiler, chunk=chunk)
        checks = [checking(submit, output) for submit, output, _ in answers.values()]
        checked = served(bench, checks, preempting=chunk == 5)
        for kind, id in zip(KINDS, answers, strict=True):
            _, output, end = answers[id]
            assert checked[id][1] == output, (kind, chunk)
            assert checked[id][2].outcome is end.outcome, (kind, chunk)
        assert bench.scheduler.status.generation_tokens == 0
        assert (bench.scheduler.status.preemptions > 0) == (chunk == 5)
    return 2 * len(answers)


def test_one_bit_of_a_weight_is_found_where_the_answer_changes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoints("llama"), tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.mlp.up_proj.weight"))
    tensors[name].view(torch.int32)[3, 5] ^= 1 << 24  # a bit of the exponent
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    was, now = (batch_invariant_decoder(folder, torch.float32) for folder in (checkpoints("llama"), copy))
    kinds = [m.Sampling(LENGTH, temperature=1.5, seed=seed, ignore_eos=True) for seed in range(8)]
    requests = [m.Submit(id, pack_u32([5, 6, 7]), kind) for id, kind in enumerate(kinds)]
    before, after = (served(RunnerBench(decoder), requests) for decoder in (was, now))
    checked = served(RunnerBench(now), [checking(submit, output) for submit, output, _ in before.values()])
    differing = 0
    for id, (_, output, _) in before.items():
        same = [one == other for one, other in zip(output, after[id][1], strict=True)]
        position = same.index(False) if False in same else LENGTH - 1
        differing += False in same
        assert checked[id][1] == after[id][1][: position + 1]
    assert differing


def test_changed_answers_end_at_the_changed_token(checkpoints: Checkpoints, compiler: GrammarCompiler) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    answers = served(RunnerBench(decoder, compiler=compiler), submits())
    draw = random.Random(1)
    places = {id: draw.randrange(len(output)) for id, (_, output, _) in answers.items()}
    checks = []
    for id, (submit, output, _) in answers.items():
        other = draw.choice([token for token in range(VOCAB) if token != output[places[id]]])
        checks.append(checking(submit, [*output[: places[id]], other, *output[places[id] + 1 :]]))
    checked = served(RunnerBench(decoder, compiler=compiler, chunk=7), checks)
    for kind, id in zip(KINDS, answers, strict=True):
        assert checked[id][1] == answers[id][1][: places[id] + 1], kind


def test_answer_that_was_cut_or_continued_ends_where_it_should(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    kinds = [
        m.Sampling(LENGTH, temperature=1.2, seed=seed, stop_token_ids=tuple(range(0, VOCAB, 9))) for seed in range(9)
    ]
    requests = [m.Submit(id, pack_u32([5, 6, 7]), kind) for id, kind in enumerate(kinds)]
    answers = served(RunnerBench(decoder), requests)
    cut = served(RunnerBench(decoder), [checking(submit, output[:-1]) for submit, output, _ in answers.values()])
    longer = served(RunnerBench(decoder), [checking(submit, [*output, 5]) for submit, output, _ in answers.values()])
    for id, (_, output, end) in answers.items():
        assert cut[id][1] == output[:-1]
        assert cut[id][2].outcome is m.Outcome.CHECKED
        assert longer[id][1] == output
        assert longer[id][2].outcome is end.outcome


def test_answer_of_no_token_is_checked_without_sampling(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    requests = [m.Submit(id, pack_u32([5, 6]), m.Sampling(most), answer=b"") for id, most in enumerate((0, 4))]
    answers = served(RunnerBench(decoder), requests)
    assert [(output, end.outcome) for _, output, end in answers.values()] == [
        ([], m.Outcome.LENGTH),
        ([], m.Outcome.CHECKED),
    ]


def test_check_resumed_after_a_crash_goes_on(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    (submit, output, _), *_ = served(RunnerBench(decoder), submits()[1:2]).values()
    again = msgspec.structs.replace(checking(submit, output), generated=pack_u32(output[:9]), crashes=1)
    bench = RunnerBench(decoder)
    bench.send(again)
    bench.iterate(20)
    steps = [step for _, step in bench.server.sent]
    assert [token for step in steps for token in unpack_u32(step.tokens)] == output[9:]
    assert [end.outcome for step in steps for end in step.ends] == [m.Outcome.LENGTH]


def test_check_that_runs_out_of_memory_is_tried_with_fewer_rows(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    (submit, output, _), *_ = served(RunnerBench(decoder), submits()[2:3]).values()
    bench, launched = RunnerBench(decoder), []
    launch = bench.runner.launch

    def limited(plan: Plan, before: InFlightStep | None = None) -> InFlightStep:
        launched.append(len(plan.rows))
        if len(plan.rows) > 8:
            raise MemoryError
        step: InFlightStep = launch(plan, before)
        return step

    bench.runner.launch = limited
    assert served(bench, [checking(submit, output)])[submit.id][1] == output
    assert max(launched) > 8
    assert len(launched) < 12

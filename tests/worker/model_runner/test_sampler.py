"""Each stage of sampling follows its request's parameters, whichever requests share the batch."""

import math

import msgspec
import pytest
import torch

from shared.messages import SamplerChain, Sampling
from worker.model_runner.sampler import is_plain, sample_rows, sampling_params
from worker.scheduler.sequence import Sequence

V, EOS = 50, (3,)


def sequence(tokens: list[int], prompt_len: int, seed: int = 1, **options: object) -> Sequence:
    options.setdefault("max_tokens", 10)
    return Sequence((b"f", 1), tokens, prompt_len, Sampling(**options), seed)  # type: ignore[arg-type]


def sample(logits: torch.Tensor, sequences: list[Sequence], eos_ids: tuple[int, ...]) -> list[int]:
    ids: list[int] = sample_rows(logits, [(one, one.next_output, ()) for one in sequences], eos_ids).tolist()
    return ids


def row(**logits: float) -> torch.Tensor:
    values = torch.full((1, V), -5.0)
    for name, value in logits.items():
        values[0, int(name[1:])] = value
    return values


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 7),
        ({"repetition_penalty": 2.0}, 9),  # 7 is in the prompt, so it is penalized
        ({"presence_penalty": 2.0}, 7),  # 7 is not in the output, so it is not penalized
        ({"logit_bias": ((9, 3.0),)}, 9),
        ({"logit_bias": ((7, -math.inf), (9, -math.inf))}, 11),
    ],
)
def test_greedy_after_penalties_and_bias(options: dict[str, object], expected: int) -> None:
    asked = sequence([7, 20], 1, temperature=0.0, **options)
    assert sample(row(_7=4.0, _9=3.0, _11=2.5), [asked], EOS) == [expected]


def test_chain_that_reports_leaves_its_result_in_the_logits() -> None:
    plain = SamplerChain(("temperature", "top_k"), 0.5, top_k=2)
    options = {"logit_bias": ((0, 2.0),), "temperature": 1.0}
    quiet, asked = (
        sequence([1], 1, chain=chain, **options) for chain in (plain, msgspec.structs.replace(plain, reports=True))
    )
    logits = torch.tensor([[0.0, 1.0, 0.5, -1.0]] * 2)
    ids = sample(logits, [quiet, asked], EOS)
    assert logits[0].tolist() == [0.0, 1.0, 0.5, -1.0] and ids[0] == ids[1]
    shares = torch.log_softmax(logits[1], 0).exp()
    assert torch.allclose(shares, torch.softmax(torch.tensor([4.0, 2.0, -math.inf, -math.inf]), 0))


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = row(_7=4.0, _9=3.9)
    twice = [1, 7, 7]
    assert sample(logits, [sequence(twice, 1, temperature=0.0, frequency_penalty=0.1)], EOS) == [9]
    assert sample(logits, [sequence(twice, 3, temperature=0.0, frequency_penalty=0.1)], EOS) == [7]


def test_eos_and_stop_ids_cannot_come_before_min_tokens() -> None:
    logits = row(_3=9.0, _4=8.0, _5=1.0)
    options = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (4,)}
    assert sample(logits, [sequence([1, 2], 1, **options)], EOS) == [5]
    assert sample(logits, [sequence([1, 2, 2], 1, **options)], EOS) == [3]
    assert sample(logits, [sequence([1, 2], 1, ignore_eos=True, **options)], EOS) == [3]


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.5, "frequency_penalty": 2.0}])
def test_rows_of_one_sequence_sample_successive_outputs(penalties: dict[str, float]) -> None:
    """As with drafts, the tokens of earlier rows count as output for later rows."""
    torch.manual_seed(0)
    logits, ids = torch.randn(6, V), [7, 9, 3, 4, 11, 13]
    logits[:, 3] += 20.0
    options = {"temperature": 0.8, "min_tokens": 5, "stop_token_ids": (4,), "logit_bias": ((11, 2.0),), **penalties}
    one_by_one = [sample(logits[i : i + 1], [sequence([1, *ids[:i]], 1, **options)], EOS)[0] for i in range(6)]
    asked = sequence([1], 1, **options)
    assert sample_rows(logits, [(asked, i, tuple(ids[:i])) for i in range(6)], EOS).tolist() == one_by_one
    assert not {3, 4} & {*one_by_one[:5]} and one_by_one[5] == 3


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}]
)
def test_draw_depends_on_seed_and_position_only(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, V) * 2
    sequences = [
        sequence([i, i + 1, i + 2][: 1 + i % 3], 1, seed=1000 + i, temperature=0.8, **options) for i in range(8)
    ]
    together = sample(logits, sequences, EOS)
    alone = [sample(logits[i : i + 1], sequences[i : i + 1], EOS)[0] for i in range(8)]
    backwards = sample(logits.flip(0), sequences[::-1], EOS)[::-1]
    assert together == alone == backwards


def test_seeds_of_64_bits_and_every_position_draw_differently() -> None:
    logits = torch.zeros(1, V)
    drawn = {
        (seed, n): sample(logits, [sequence([0] * n, 1, seed=seed)], EOS)[0]
        for seed in (0, 1, 2**63, 2**64 - 1)
        for n in range(1, 60)
    }
    for seed in (0, 1, 2**63, 2**64 - 1):
        assert len({drawn[seed, n] for n in range(1, 60)}) > 20


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    counts = [0] * 4
    for seed in range(3000):
        counts[sample(logits, [sequence([0], 1, seed=seed)], ())[0]] += 1
    for count, share in zip(counts, (0.5, 0.3, 0.15, 0.05), strict=True):
        assert abs(count / 3000 - share) < 5 * math.sqrt(share * (1 - share) / 3000)


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33])
def test_sampling_params_columns_are_complete_and_aligned(rows: int) -> None:
    asked = [(sequence([0], 1, seed=i, temperature=0.5, top_k=i), 0, ()) for i in range(rows)]
    params = sampling_params(asked, EOS, torch.device("cpu"))
    plain, others = params.plain, (params.repetition, params.presence, params.frequency)
    floats, ints = (plain.temperature, plain.top_p, plain.min_p, *others), (plain.top_k, plain.seeds, plain.positions)
    for group in (floats, ints):
        assert all(column.shape == (rows,) and column.is_contiguous() for column in group)
        assert all((column.data_ptr() - group[0].data_ptr()) % 128 == 0 for column in group)
    assert plain.top_k.tolist() == plain.seeds.tolist() == list(range(rows))


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 3}, True),
        ({"min_tokens": 2}, True),
        ({"min_tokens": 3}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"logit_bias": ((7, 1.0),)}, False),
    ],
)
def test_is_plain_after_two_output_tokens(options: dict[str, object], plain: bool) -> None:
    assert is_plain(sequence([5, 6, 7, 8], prompt_len=2, **options)) is plain

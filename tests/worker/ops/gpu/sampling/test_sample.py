"""The kernels draw the same ids as plain PyTorch, which here uses NumPy's exp, as Triton's interpreter does."""

import random as host_random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.sampling import Row, moved_to, params_of
from worker.ops import sampling
from worker.ops.sampling import reference as plain
from worker.ops.sampling.reference import EVERY, Stages, sample_torch

# a warning of NumPy; infinity is the right result
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in divide")


@pytest.fixture(autouse=True)
def the_same_exp(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def weights(gap: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(-gap.numpy())).mul_(float(plain.ONE)).long()

    if device == "cpu":
        monkeypatch.setattr(plain, "_integer_weights", weights)


def check(logits: Tensor, rows: list[Row], device: str, stages: Stages = EVERY, **sizes: int) -> list[int]:
    """Compares the kernel with PyTorch, and returns the ids.

    sizes: arguments of the kernel, so small that there are many parts, and that lists overflow
    """
    from worker.ops.sampling.triton import sample_triton

    params, logits = moved_to(params_of(rows).plain, device), logits.to(device)
    before = logits.clone()
    got = sample_triton(logits, params, stages, **sizes)
    assert got.dtype == torch.int64 and got.tolist() == sample_torch(logits, params).tolist()
    assert torch.equal(logits, before) or before.isnan().any()
    return got.tolist()


def wish(dice: host_random.Random, width: int) -> Row:
    return Row(
        temperature=dice.choice([0.0, 1e-6, 0.4, 1.0, 1.0, 3.0, 100.0]),
        top_k=dice.choice([0, 0, 1, 2, 40, width // 2, width, width + 9]),
        top_p=dice.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.9999]),
        min_p=dice.choice([0.0, 0.0, 0.03, 1.0]),
        seed=dice.getrandbits(64),
        position=dice.randrange(5000),
    )


@pytest.mark.parametrize("grain", [0.0, 0.25])  # 0.25: logits full of ties, as bf16 leaves them
@pytest.mark.parametrize(
    ("width", "sizes"),
    [
        (1, {"part_size": 32}),
        (130, {"part_size": 256}),  # one part that is not full
        (500, {"part_size": 128, "max_one_pass": 16, "max_listed": 256}),
        (500, {"part_size": 128, "max_one_pass": 0, "max_listed": 3}),  # two passes over every row; all lists overflow
    ],
)
def test_sample_triton_chooses_the_tokens_of_sample_torch(
    width: int, sizes: dict[str, int], grain: float, device: str
) -> None:
    dice = host_random.Random(width + len(sizes))
    logits = random(12, width, seed=len(sizes)) * 3
    logits = (logits / grain).round() * grain if grain else logits
    logits[:, ::7] = torch.where(torch.arange(12) % 5 == 0, -torch.inf, logits[:, ::7].T).T
    check(logits, [wish(dice, width) for _ in range(12)], device, **sizes)


def test_top_p_applies_to_the_tokens_that_top_k_keeps(device: str) -> None:
    """The logits are nearly equal, so that top-p over all tokens would keep far more of them."""
    logits = torch.linspace(0, -0.5, 500).expand(6, -1)
    drawn = check(
        logits, [Row(top_k=100, top_p=0.3, seed=seed) for seed in range(6)], device, part_size=256, max_one_pass=8
    )
    assert max(drawn) < 31


def test_rows_without_a_finite_maximum_draw_token_0(device: str) -> None:
    logits = torch.full((8, 300), -torch.inf)
    logits[1, 200] = logits[2, 17] = 1.0
    logits[3, 40:] = torch.nan
    logits[4, 250:] = torch.inf
    logits[5] = 0.0
    logits[5, 100] = -0.0
    logits[6, 5:9] = torch.tensor([-3.0, -2.0, -torch.nan, 7.0])
    logits[7, 11], logits[7, 12] = -0.0, 0.0
    assert check(logits, [Row(temperature=0)] * 8, device, part_size=128) == [0, 200, 17, 40, 250, 0, 7, 11]
    drawn = check(logits, [Row(top_k=1, top_p=0.9)] * 8, device, part_size=128)
    assert drawn == [0, 200, 17, 0, 0, 0, 0, 11]


def test_stages_save_work_and_change_no_token(device: str) -> None:
    logits = random(3, 300)
    rows = [Row(seed=seed, min_p=0.1) for seed in range(3)]
    uncut = check(logits, rows, device, Stages(any_greedy=False, any_top_k=False, any_top_p=False), part_size=128)
    assert uncut == check(logits, rows, device, part_size=128)
    cold = [replace(row, temperature=0) for row in rows]
    assert check(logits, cold, device, Stages(all_greedy=True), part_size=128) == logits.argmax(1).tolist()


def test_frequencies_are_the_probabilities(device: str) -> None:
    """A chi-square test with three degrees of freedom: by chance, the sum exceeds 21 once in ten thousand times."""
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = torch.full((120, 40), -torch.inf)
    logits[:, [3, 30, 31, 39]] = shares.log()
    rows = [Row(seed=seed // 12, position=seed % 12) for seed in range(120)]
    drawn = check(logits, rows, device, Stages(any_top_k=False, any_top_p=False), part_size=32)
    seen = torch.bincount(torch.tensor(drawn), minlength=40)[[3, 30, 31, 39]]
    assert int(seen.sum()) == 120
    assert float(((seen - 120 * shares) ** 2 / (120 * shares)).sum()) < 21


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128_256, 262_144])
def test_whole_vocabularies_in_a_captured_graph(width: int, device: str) -> None:
    """A replay draws with the current values of the columns, and reads nothing back to the host."""
    dice = host_random.Random(width)
    rows = [wish(dice, width) for _ in range(64)]
    logits, params = random(64, width).to(device) * 3, moved_to(params_of(rows).plain, device)
    sampling.sample_plain(logits, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sampling.sample_plain(logits, params)
    for round_to in (0.0, 0.125):
        if round_to:
            logits.copy_((logits / round_to).round() * round_to)
        params.positions.add_(1)
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(got, sample_torch(logits, params))

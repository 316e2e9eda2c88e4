"""Sampling columns at fixed addresses equal the results of sampling_params, while sequences come, go and move."""

from array import array
from dataclasses import fields

import torch
from torch import Tensor

from shared.messages import Sampling
from worker.model_runner.cuda_graph_capture import GREEDY, PlainSampling
from worker.model_runner.sampler import sampling_params
from worker.ops.sampling.reference import EVERY, PlainParams, Stages
from worker.scheduler.sequence import Row, Sequence

CPU = torch.device("cpu")
MOST = 6


def sequence(id: int, temperature: float) -> Sequence:
    sampling = Sampling(50, temperature=temperature, top_k=id % 4, top_p=1 - 0.01 * (id % 7), min_p=0.01 * (id % 3))
    return Sequence((b"f", id), [0], 1, sampling, (1 << 64) - 1 - id, pages=[array("i", [id])])


class Sampled:
    """Sampling with a fake kernel, which records its parameters and returns the ids 100, 101 …"""

    def __init__(self) -> None:
        self.ids = torch.zeros(MOST, dtype=torch.int64)
        self.sampling = PlainSampling(torch.zeros(MOST, 9), self.ids, self._kernel)
        self.calls: list[tuple[PlainParams, Stages]] = []

    def _kernel(self, logits: Tensor, params: PlainParams, stages: Stages) -> Tensor:
        self.calls.append((params, stages))
        return 100 + torch.arange(len(logits))


def check(sampled: Sampled, rows: list[Row]) -> None:
    sampled.sampling.fill(rows).compute()
    params, stages = sampled.calls[-1]
    wanted = sampling_params(rows, (), CPU).plain
    for item in fields(wanted):
        assert torch.equal(getattr(params, item.name)[: len(rows)], getattr(wanted, item.name)), item.name
    assert stages is EVERY and sampled.ids[: len(rows)].tolist() == list(range(100, 100 + len(rows)))


def test_parameters_of_plain_rows_follow_their_sequences() -> None:
    sampled, (a, b, c, d) = Sampled(), (sequence(id, 0.1 * id) for id in range(1, 5))
    check(sampled, [(a, 0, ()), (b, 3, ())])
    check(sampled, [(a, 1, ()), (b, 4, ()), (c, 0, ())])
    check(sampled, [(b, 5, ()), (c, 1, ()), (c, 2, ()), (c, 3, ())])
    check(sampled, [(d, 0, ())])
    check(sampled, [(b, 6, ()), (d, 1, ())])


def test_greedy_rows_use_the_short_sampling_of_their_size() -> None:
    sampled, rows = Sampled(), [(sequence(id, 0.0), 0, ()) for id in range(3)]
    captured = sampled.sampling.fill(rows)
    captured.compute()
    assert sampled.calls[-1][1] is GREEDY and captured.name == "the sampling of 4 greedy rows"
    assert sampled.ids.tolist() == [100, 101, 102, 103, 0, 0]
    assert captured is sampled.sampling.fill(rows[:3]) and captured in list(sampled.sampling.every())


def test_every_size_has_both_samplings() -> None:
    names = [captured.name for captured in Sampled().sampling.every()]
    assert (
        len(set(names)) == 8 and names[0] == "the sampling of 6 rows" and names[-1] == "the sampling of 1 greedy rows"
    )

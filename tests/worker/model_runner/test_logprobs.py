"""Log-probabilities of a step with different requests equal those of each request computed separately."""

import pytest
import torch

from shared.messages import Logprobs, Sampling
from shared.wire import unpack_f32, unpack_u32
from worker.model_runner import logprobs
from worker.model_runner.inputs import LogitsUse
from worker.model_runner.logprobs import launch_logprobs
from worker.model_runner.step import HostCopy
from worker.scheduler.host_budget import FEW
from worker.scheduler.sequence import Chunk, Plan, Sequence


def sequence(id: int, tokens: list[int], prompt_len: int, **options: object) -> Sequence:
    return Sequence((b"f", id), tokens, prompt_len, Sampling(9, **options), 0)  # type: ignore[arg-type]


def check(told: Logprobs, logits: torch.Tensor, tokens: list[int], top: int) -> None:
    """Checks one Logprobs message. logits: [N, V]. tokens: the token of each row"""
    expected = logits.double().log_softmax(-1)
    assert told.top == top
    chosen = torch.tensor(unpack_f32(told.chosen)).double()
    torch.testing.assert_close(chosen, expected[range(len(tokens)), tokens], atol=3e-6, rtol=0)
    best = expected.topk(top)
    assert list(unpack_u32(told.top_ids)) == best.indices.flatten().tolist()
    values = torch.tensor(unpack_f32(told.top_logprobs)).double()
    torch.testing.assert_close(values, best.values.flatten(), atol=3e-6, rtol=0)


def test_logprobs_messages_have_their_own_rows_from_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def counted(values: torch.Tensor) -> HostCopy:
        copies.append(values)
        return HostCopy(values)

    monkeypatch.setattr(logprobs, "HostCopy", counted)
    running = sequence(1, [5, 6, 7, 8], 2, logprobs=3)
    silent = sequence(2, [5, 6], 2)
    asked = sequence(3, [9, 8, 7, 6], 4, logprobs=2, prompt_logprobs=True)
    begun = sequence(4, [1, 2, 3, 4, 5], 5, prompt_logprobs=True)
    chunks = [
        Chunk(running, 3, 1, True),
        Chunk(silent, 1, 1, True),
        Chunk(asked, 1, 3, True),
        Chunk(begun, 0, 2, False),
    ]
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    wanted = LogitsUse(sampled=[0, 1, 4], prompts=[(2, 2, 2), (3, 5, 2)])
    ids = torch.tensor([11, 12, 13])
    told = launch_logprobs(Plan(chunks), Plan(chunks).rows, wanted, logits, logits[wanted.sampled], ids)()
    assert [(who, one.id, one.start, one.prompt) for who, one in told] == [
        (running, 1, 2, False), (asked, 3, 0, False), (asked, 3, 2, True), (begun, 4, 1, True)
    ]  # fmt: skip
    check(told[0][1], logits[:1], [11], 3)
    check(told[1][1], logits[4:5], [13], 2)
    check(told[2][1], logits[2:4], [7, 6], 2)
    check(told[3][1], logits[5:], [2, 3], 0)
    sorted_logits = logits[2:4].sort(descending=True).indices.tolist()
    assert list(unpack_u32(told[2][1].ranks)) == [
        row.index(token) + 1 for row, token in zip(sorted_logits, [7, 6], strict=True)
    ]
    assert told[0][1].ranks == b"" and len(copies) == 1


def test_prompt_top_scores_the_prompt_without_the_answer() -> None:
    asked = sequence(3, [9, 8, 7], 3, prompt_logprobs=True, prompt_top=4)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    use = LogitsUse(sampled=[2], prompts=[(0, 0, 2)])
    plan = Plan([Chunk(asked, 0, 3, True)])
    ((_, told),) = launch_logprobs(plan, plan.rows, use, logits, logits[2:], torch.tensor([11]))()
    check(told, logits[:2], [8, 7], 4)


def test_request_for_the_whole_vocabulary_leaves_the_rows_of_others_as_they_are() -> None:
    vocab = 1000
    some, whole, other = (sequence(id, [5, 6], 2, logprobs=top) for id, top in ((1, 3), (2, vocab), (3, FEW)))
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    chunks = [Chunk(one, 1, 1, True) for one in (some, whole, other)]
    told = launch_logprobs(
        Plan(chunks), Plan(chunks).rows, LogitsUse([0, 1, 2], []), logits, logits, torch.tensor([11, 12, 13])
    )()
    assert [(who, one.id, one.start) for who, one in told] == [(some, 1, 0), (other, 3, 0), (whole, 2, 0)]
    check(told[0][1], logits[:1], [11], 3)
    check(told[1][1], logits[2:], [13], FEW)
    check(told[2][1], logits[1:2], [12], vocab)
    assert torch.tensor(unpack_f32(told[2][1].top_logprobs)).double().exp().sum() == pytest.approx(1, abs=1e-5)

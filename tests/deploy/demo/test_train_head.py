"""deploy/demo/training/train_head.py, with a model of a few thousand weights."""

from itertools import islice, repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.demo.training.batches import Batch, pack
from deploy.demo.training.head import Head
from deploy.demo.training.train_head import WEIGHTS, add_head, head_loss, train_head
from tests.deploy.demo.test_train import tiny_model


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = list(range(3, 15))
    return pack([[(ids, [1.0] * len(ids)), (ids[::-1], [1.0] * len(ids))]], 30)


def test_each_pass_computes_what_the_head_drafts_one_token_after_another(batch: Batch) -> None:
    torch.manual_seed(2)
    head, model = Head(tiny_model().config), tiny_model()
    hidden, following = torch.randn(2, 1, 30, 16)
    rotary = model.model.rotary_emb(hidden, batch.positions)

    def rows(hidden: torch.Tensor, count: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [*head.passes(hidden, following, rotary, batch.mask, count)]

    passes = rows(hidden, 3)
    for row in (5, 11, 20):  # rows of two documents; the second document begins at row 12
        drafting = hidden.clone()
        for drafted in range(3):
            own = drafting.clone()
            for back in range(drafted):  # the last rows read outputs of the head instead of hidden states
                own[:, row - back] = passes[drafted - 1 - back][:, row - back - 1]
            torch.testing.assert_close(rows(own, 1)[0][:, row], passes[drafted][:, row])


def test_head_learns_repeats_exactly_and_leaves_the_model_as_it_is(batch: Batch) -> None:
    model = tiny_model().bfloat16()
    model.model.embed_tokens.weight.data *= 40  # so that distributions differ from row to row
    before = [parameter.clone() for parameter in model.parameters()]
    heads = []
    for _ in range(2):
        torch.manual_seed(3)
        heads.append(Head(model.config))
    with torch.no_grad():
        first = float(head_loss(heads[0], model, batch))
    for head in heads:
        train_head(head, model, islice(repeat(batch), 40), 40, 1e-2)
    with torch.no_grad():
        assert float(head_loss(heads[0], model, batch)) < 0.9 * first
    assert all(map(torch.equal, heads[0].parameters(), heads[1].parameters()))
    assert all(map(torch.equal, before, model.parameters()))


def test_head_is_added_beside_the_model_and_replaces_an_older_one(tmp_path: Path) -> None:
    save_file({"model.x": torch.ones(3), "mtp.old": torch.ones(2)}, tmp_path / WEIGHTS)
    add_head(Head(tiny_model().config), tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    assert torch.equal(stored.pop("model.x"), torch.ones(3)) and "mtp.old" not in stored
    assert "mtp.layers.0.self_attn.q_proj.weight" in stored and all(name.startswith("mtp.") for name in stored)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}

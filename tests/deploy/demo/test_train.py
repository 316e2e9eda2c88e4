"""deploy/demo/training/train.py, with a model of a few thousand weights."""

import json
from itertools import repeat
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deploy.demo.training import train
from deploy.demo.training.batches import Batch, pack
from deploy.demo.training.corpus import END_OF_TEXT, IM_END, IM_START
from deploy.demo.training.train import CHAT_TEMPLATE, WARMUP_STEPS, Plan

PEAK = 1e-2


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = list(range(3, 15))
    return pack([[(ids, [1.0] * len(ids)), (ids[::-1], [1.0] * len(ids))]], 30)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TOKENIZER_DOCUMENTS", 200)
        return train.train_tokenizer(400, 1)


def test_rate_rises_stays_at_peak_and_falls_to_zero() -> None:
    rates = [train.rate(step, 200, PEAK) for step in range(201)]
    assert rates[0] == pytest.approx(PEAK / WARMUP_STEPS)
    assert rates[: WARMUP_STEPS + 1] == sorted(rates[: WARMUP_STEPS + 1])
    assert set(rates[WARMUP_STEPS:101]) == {PEAK}
    assert rates[101:] == sorted(rates[101:], reverse=True) and rates[-1] == 0
    assert [train.rate(step, 400, PEAK) for step in range(101)] == rates[:101], "the plateau is independent of total"


def test_loss_weights_each_label(batch: Batch) -> None:
    model = tiny_model()
    halves = [torch.zeros_like(batch.weights), torch.zeros_like(batch.weights)]
    halves[0][:, :12], halves[1][:, 12:] = batch.weights[:, :12], batch.weights[:, 12:]
    parts = [Batch(batch.tokens, batch.labels, weights, batch.positions, batch.mask) for weights in halves]
    with torch.no_grad():
        total, *losses = (float(train.loss_of(model, part)) for part in (batch, *parts))
    assert total == pytest.approx(sum(losses) / 2, rel=1e-3)  # both documents have the same number of labels


def test_optimizers_share_all_parameters_without_overlap() -> None:
    model = tiny_model()
    groups = [group["params"] for optimizer in train.optimizers(model, PEAK) for group in optimizer.param_groups]
    ids = [id(parameter) for group in groups for parameter in group]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    assert {parameter.ndim for parameter in groups[0]} == {2}


def test_train_lowers_the_loss_and_repeats_exactly(batch: Batch) -> None:
    models = [tiny_model(), tiny_model()]
    with torch.no_grad():
        before = float(train.loss_of(models[0], batch))
    steps = [train.train(model, repeat(batch), Plan(30, 0.0, PEAK, compiled=False)) for model in models]
    with torch.no_grad():
        after = float(train.loss_of(models[0], batch))
    assert steps == [30, 30] and after < 0.8 * before
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def test_tokenizer_has_special_tokens_and_single_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids([END_OF_TEXT, IM_START, IM_END]) == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (END_OF_TEXT, IM_END)
    assert len(tokenizer.encode("2026")) == 4
    assert tokenizer.decode(tokenizer.encode("naïve 🙂")) == "naïve 🙂"


def test_model_config_takes_sizes_and_ends_from_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    config = train.model_config(tokenizer)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == [2, 0]


def test_save_replaces_folder_with_portable_checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "stale").touch()
    train.save(tiny_model(), tokenizer, out)
    assert not (out / "stale").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["chat_template"] == CHAT_TEMPLATE and not {"is_local", "local_files_only"} & written.keys()
    assert not (out / "chat_template.jinja").exists()
    model = LlamaForCausalLM.from_pretrained(out)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

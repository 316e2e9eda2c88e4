"""Encoders give the vectors of transformers, and the same bits alone and in any company."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray
from tokenizers import Tokenizer as Library

from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.gguf.config_encoder import unigram
from shared.gguf.translated import translated
from tests import encoders
from worker.encoder.encoder import EncoderRunner
from worker.engine.build import Engine, load_engine
from worker.operations import FAST
from worker.scheduler.sequence import Chunk, Plan, Sequence

TEXT = [2, *range(5, 33), 3]
MEAN = m.Pooling(m.PoolingKind.MEAN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that writes an encoder of a kind once."""

    @cache
    def folder(kind: str) -> Path:
        return encoders.encoder(tmp_path_factory.mktemp("encoders") / kind, kind)

    return folder


@cache
def engine_of(folder: Path, dtype: str = "float32") -> Engine:
    return load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", dtype=dtype))


def sequence(ids: list[int], pooling: m.Pooling, second_from: int = 0) -> Sequence:
    return Sequence((b"", 0), ids, len(ids), m.Sampling(0), 0, pooling=pooling, second_from=second_from)


def computed(engine: Engine, *sequences: Sequence) -> list[NDArray[np.float32]]:
    """Computes texts in one step with the loop in C, and asserts that the loop in Python gives the same bits."""
    found = computed_once(engine, *sequences)
    encoder = cast(EncoderRunner, engine.runner)._encoder
    assert encoder._in_c is not None
    encoder.operations = replace(FAST)  # which is not FAST itself
    assert [rows.tobytes() for rows in computed_once(engine, *sequences)] == [rows.tobytes() for rows in found]
    encoder.operations = FAST
    return found


def computed_once(engine: Engine, *sequences: Sequence) -> list[NDArray[np.float32]]:
    plan = Plan([Chunk(one, 0, len(one.tokens), False) for one in sequences])
    return [rows for _, _, rows in engine.runner.launch(plan).read().pooled]


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_hidden_states_are_those_of_transformers(folders: Callable[[str], Path], kind: str) -> None:
    engine, tokens = engine_of(folders(kind)), m.Pooling(m.PoolingKind.TOKENS)
    for ids in (TEXT, TEXT[:7], [2, 9, 3], [5]):
        (found,) = computed(engine, sequence(ids, tokens))
        expected = encoders.hidden_states(folders(kind), ids)
        assert torch.from_numpy(found).sub(expected).abs().max() < 1e-5 * expected.abs().max(), len(ids)


@pytest.mark.parametrize("kind", ["bert", "nomic_bert"])
def test_second_text_has_the_second_token_type(folders: Callable[[str], Path], kind: str) -> None:
    (found,) = computed(engine_of(folders(kind)), sequence(TEXT, m.Pooling(m.PoolingKind.TOKENS), 12))
    expected = encoders.hidden_states(folders(kind), TEXT, [0] * 12 + [1] * (len(TEXT) - 12))
    assert torch.from_numpy(found).sub(expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "pooled"), [
    ("cls", lambda rows: rows[0]), ("mean", lambda rows: rows.mean(0)), ("max", lambda rows: rows.amax(0)),
    ("lasttoken", lambda rows: rows[-1]),
])  # fmt: skip
def test_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, name: str, pooled: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = encoders.encoder(tmp_path / "model", pooling=name, dense=(20, "Tanh"))
    engine = engine_of(folder)
    assert engine.limits.hidden_size == 20 and engine.task.normalized
    (found,) = computed(engine, sequence(TEXT, m.Pooling(engine.task.pooling)))
    torch.manual_seed(2)
    weight, bias = torch.randn(20, 48), torch.randn(20)
    expected = torch.tanh(weight @ pooled(encoders.hidden_states(folder, TEXT)) + bias)
    torch.testing.assert_close(torch.from_numpy(found[0]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", encoders.WITH_HEADS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classification_head_is_that_of_transformers(tmp_path: Path, kind: str, labels: int) -> None:
    folder = encoders.classifier(tmp_path / "model", kind, labels)
    scores = m.Pooling(m.PoolingKind.LOGITS, token_ids=tuple(range(labels)))
    (found,) = computed(engine_of(folder), sequence(TEXT, scores))
    torch.testing.assert_close(torch.from_numpy(found[0]), encoders.class_logits(folder, TEXT), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "embeddinggemma"])
@settings(max_examples=12, deadline=None)
@given(lengths=some.lists(some.integers(1, 40), min_size=1, max_size=30), place=some.integers(0, 30))
def test_bits_of_a_text_do_not_depend_on_its_company(
    folders: Callable[[str], Path], kind: str, dtype: str, lengths: list[int], place: int
) -> None:
    engine, mean = engine_of(folders(kind), dtype), m.Pooling(m.PoolingKind.MEAN)
    company = [[(7 * i + j) % 90 + 5 for j in range(length)] for i, length in enumerate(lengths)]
    at = min(place, len(company))
    alone = computed(engine, sequence(TEXT, mean))[0]
    together = computed(engine, *(sequence(ids, mean) for ids in (*company[:at], TEXT, *company[at:])))
    assert together[at].tobytes() == alone.tobytes()
    assert not np.isnan(alone).any()


@pytest.mark.parametrize("kind", encoders.GGUF_KINDS)
def test_gguf_file_gives_the_vectors_of_the_checkpoint(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = encoders.gguf_of(folders(kind), tmp_path / "model.gguf", kind)
    engine = engine_of(file)
    assert engine.task.encoder and engine.task.pooling is m.PoolingKind.MEAN and engine.task.normalized
    (found,) = computed(engine, sequence(TEXT, MEAN))
    expected = encoders.hidden_states(folders(kind), TEXT).mean(0)
    if kind == "embeddinggemma":
        torch.manual_seed(4)
        for shape in ((64, 48), (32, 64)):
            expected = torch.randn(shape) @ expected
    assert torch.from_numpy(found[0]).sub(expected).abs().max() < 1e-5 * expected.abs().max()
    if kind == "bert":  # the other files have the same tokenizer
        frontend = Tokenizer.load(translated([file], tmp_path / "text", only_text=True))
        assert frontend.task.encoder and frontend.task.pooling is m.PoolingKind.MEAN
        text = "The River runs, past stonework"
        assert frontend.encode_now([text])[0] == encoders.word_piece()(text)["input_ids"]
        assert frontend.around == (1, 1)


def test_other_tokenizers_of_gguf_encoders(tmp_path: Path) -> None:
    """XLM-RoBERTa's Unigram model: spaces are spelled, words are split, and the texts of a pair have a gap of two."""
    texts = ["<s>", "<pad>", "</s>", "<unk>", "▁red", "▁mi", "ll", "▁", "r", "e", "d"]
    made = unigram(FakeVocabulary(texts, [-0.5 * i for i in range(len(texts))]))  # type: ignore[arg-type]
    tokenizer = Library.from_str(json.dumps({"version": "1.0", "truncation": None, "padding": None, **made}))
    assert tokenizer.encode("red  mill").tokens == ["<s>", "▁red", "▁mi", "ll", "</s>"]
    pair = tokenizer.encode("red", "mill")
    assert pair.tokens == ["<s>", "▁red", "</s>", "</s>", "▁mi", "ll", "</s>"] and set(pair.type_ids) == {0}


class FakeVocabulary:
    """The tokens of a file, as shared/gguf/tokenizer.py reads them."""

    def __init__(self, texts: list[str], scores: list[float]) -> None:
        self.texts, self.container = texts, self
        self.metadata = {"tokenizer.ggml.scores": scores}
        self.name = "model.gguf"

    def added(self) -> list[int]:
        return [0, 1, 2, 3]

    def named(self, name: str) -> int | None:
        return {"bos": 0, "eos": 2, "unknown": 3}.get(name)

    def entries(self, key: str, kind: object, default: list[float] | None = None) -> list[float]:
        return self.metadata.get(key, default or [])

    def flag(self, key: str, default: bool) -> bool:
        return default

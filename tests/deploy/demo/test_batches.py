"""deploy/demo/training/batches.py, with the committed tokenizer."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deploy.demo.training import batches, corpus
from deploy.demo.training.batches import IGNORED, READ_WEIGHT, SHAPES, encode, pack, rows_of
from deploy.demo.training.corpus import Segment

MODEL = Path(corpus.__file__).parents[1] / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_encode_weights_each_token_by_its_segment(tokenizer: Tokenizer) -> None:
    ids, weights = encode(tokenizer, (Segment("Who is there?", learn=False), Segment("A cat.", learn=True)))
    read, learned = (len(tokenizer.encode(text).ids) for text in ("Who is there?", "A cat."))
    assert tokenizer.decode(ids) == "Who is there?A cat."
    assert weights == [READ_WEIGHT] * read + [1.0] * learned


def test_rows_hold_whole_documents_up_to_length(tokenizer: Tokenizer) -> None:
    documents = [(Segment("1" * length, learn=True),) for length in (3, 4, 2, 9, 1)]  # each digit is a token
    rows = list(rows_of(tokenizer, iter([*documents, *documents]), 7))
    assert [[len(ids) for ids, _ in row] for row in rows] == [[3, 4], [2], [7], [1, 3], [4, 2], [7]]


def test_pack_shifts_labels_and_restarts_positions() -> None:
    batch = pack([[([5, 6, 7], [0.1, 1.0, 1.0]), ([8, 9], [1.0, 0.1])], [([4], [1.0])]], 6)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0], [4, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED], [IGNORED] * 6]
    assert torch.equal(batch.weights, torch.tensor([[1.0, 1.0, 0.0, 0.1, 0.0, 0.0], [0.0] * 6]))
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]


def test_pack_mask_allows_earlier_tokens_of_same_document_only() -> None:
    batch = pack([[([5, 6], [1.0, 1.0]), ([7, 8], [1.0, 1.0])]], 5)
    allowed = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert batch.mask.shape == (1, 1, 5, 5)
    assert batch.mask[0, 0].int().tolist() == allowed


def test_batches_have_the_shape_that_is_due_and_repeat_with_seed(tokenizer: Tokenizer) -> None:
    first, second = (list(islice(batches.batches(tokenizer, 3), 8)) for _ in range(2))
    assert [tuple(batch.tokens.shape) for batch in first] == [(SHAPES[0].rows, SHAPES[0].length)] * 7 + [
        (SHAPES[1].rows, SHAPES[1].length)
    ]
    assert all(torch.equal(x.tokens, y.tokens) for x, y in zip(first, second, strict=True))
    for batch in first:
        learned = batch.labels != IGNORED
        assert torch.equal(learned, batch.weights > 0)
        rows, columns = torch.nonzero(learned, as_tuple=True)
        assert torch.equal(batch.labels[rows, columns], batch.tokens[rows, columns + 1])

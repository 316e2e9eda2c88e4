"""Training batches: rows of whole documents, masked so that no document attends to its neighbours.

Some rows are long, so that the model has seen the positions of long conversations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.demo.training.corpus import Document, documents, long_documents

READ_WEIGHT = 0.1  # loss weight of text that the model does not learn to write, such as questions
IGNORED = -100  # the label of padding


@dataclass(frozen=True)
class Shape:
    """A kind of batch with `rows` rows of `length` tokens, used every `every` steps."""

    rows: int
    length: int
    every: int
    long_text: bool


# A step uses the last shape here whose `every` divides the step's number. All have about the same number of tokens.
SHAPES = (
    Shape(rows=6, length=512, every=1, long_text=False),
    Shape(rows=3, length=1024, every=8, long_text=True),
    Shape(rows=2, length=2048, every=40, long_text=True),
)


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [rows, length] int64
    labels: Tensor  # [rows, length] int64, IGNORED where there is no next token
    weights: Tensor  # [rows, length] float32
    positions: Tensor  # [rows, length] int64, from 0 in each document
    mask: Tensor  # [rows, 1, length, length] bool, true where attention is allowed


Encoded = tuple[list[int], list[float]]


def encode(tokenizer: Tokenizer, document: Document) -> Encoded:
    """Returns the token ids, and the loss weight of each id as a target. Segments are tokenized separately."""
    ids: list[int] = []
    weights: list[float] = []
    for segment in document:
        piece = tokenizer.encode(segment.text, add_special_tokens=False).ids
        ids += piece
        weights += [1.0 if segment.learn else READ_WEIGHT] * len(piece)
    return ids, weights


def rows_of(tokenizer: Tokenizer, stream: Iterator[Document], length: int) -> Iterator[list[Encoded]]:
    """Groups whole documents into rows of at most `length` tokens; longer documents are cut."""
    row: list[Encoded] = []
    free = length
    for document in stream:
        ids, weights = encode(tokenizer, document)
        if len(ids) > free and row:
            yield row
            row, free = [], length
        row.append((ids[:length], weights[:length]))
        free -= len(row[-1][0])


def pack(rows: list[list[Encoded]], length: int) -> Batch:
    shape = (len(rows), length)
    tokens, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels, weights = torch.full(shape, IGNORED), torch.zeros(shape)
    document_of = torch.full(shape, -1)
    for index, row in enumerate(rows):
        start = 0
        for number, (ids, weight) in enumerate(row):
            end = start + len(ids)
            tokens[index, start:end] = torch.tensor(ids)
            labels[index, start : end - 1] = torch.tensor(ids[1:])
            weights[index, start : end - 1] = torch.tensor(weight[1:])
            positions[index, start:end] = torch.arange(len(ids))
            document_of[index, start:end] = number
            start = end
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (document_of[:, :, None] == document_of[:, None, :]) & causal
    return Batch(tokens, labels, weights, positions, mask[:, None])


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    sources = [
        rows_of(
            tokenizer,
            (long_documents if shape.long_text else documents)(seed + index),
            shape.length,
        )
        for index, shape in enumerate(SHAPES, start=1)
    ]
    step = 0
    while True:
        step += 1
        due = max(index for index, shape in enumerate(SHAPES) if step % shape.every == 0)
        shape = SHAPES[due]
        yield pack(list(islice(sources[due], shape.rows)), shape.length)

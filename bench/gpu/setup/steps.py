"""Builds steps without a scheduler: chunks of sequences whose pages lie in random order in the pool."""

import random
from array import array
from collections.abc import Iterable

import torch

from shared.messages import Sampling
from worker.model_runner.inputs import build_inputs
from worker.models.forward_inputs import ForwardInputs
from worker.scheduler.sequence import Chunk, Sequence

GREEDY = Sampling(1 << 20, temperature=0.0, ignore_eos=True)


def sequences(lengths: Iterable[int], page_size: int, vocab: int, seed: int) -> tuple[list[Sequence], int]:
    """Returns a sequence of each length, with pages in random order, and the number of pages that the pool needs.

    This number includes the scratch page.
    """
    rng = random.Random(seed)
    made = [Sequence((b"", at), rng.choices(range(vocab), k=n), n, GREEDY, at) for at, n in enumerate(lengths)]
    counts = [-(-len(sequence.tokens) // page_size) for sequence in made]
    pages = list(range(1, sum(counts) + 1))
    rng.shuffle(pages)
    for sequence, count in zip(made, counts, strict=True):
        sequence.pages = [array("i", pages[:count])]
        del pages[:count]
    return made, sum(counts) + 1


def last(sequence: Sequence, count: int, *, upto: int = 0) -> Chunk:
    """Returns a chunk of the last `count` tokens before `upto` (0: the sequence's end). The chunk samples an id."""
    end = upto or len(sequence.tokens)
    return Chunk(sequence, end - count, count, True)


def packed(chunks: list[Chunk], page_size: int, device: torch.device) -> ForwardInputs:
    return build_inputs(chunks, page_size, device)[0]

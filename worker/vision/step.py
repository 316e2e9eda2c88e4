"""The rows of a step that pictures replace. A chunk may begin or end within a picture."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from worker.model.inputs.forward_inputs import ForwardInputs
from worker.schedule.sequence import Chunk
from worker.vision.vision import Vision


def with_pictures(inputs: ForwardInputs, chunks: Sequence[Chunk], vision: Vision) -> ForwardInputs:
    """Returns the inputs with the vectors of the placeholder tokens in these chunks. Encodes what is not cached."""
    indices, vectors = [], []
    begins = accumulate((chunk.length for chunk in chunks), initial=0)
    for begin, chunk in zip(begins, chunks, strict=False):
        for first, rows in _vectors_of(chunk, vision):
            indices.append(torch.arange(begin + first, begin + first + len(rows)))
            vectors.append(rows)
    if not indices:
        return inputs
    return replace(inputs, replaced=(torch.cat(indices).to(inputs.token_ids.device), torch.cat(vectors)))


def _vectors_of(chunk: Chunk, vision: Vision) -> list[tuple[int, Tensor]]:
    """Returns the vectors of each picture that is in a chunk in part, with the index of their first row there."""
    if chunk.sequence.pictures is None:
        return []
    end, found = chunk.start + chunk.length, []
    for picture in chunk.sequence.pictures.within(chunk.start, end):
        first, last = max(chunk.start, picture.start), min(end, picture.start + picture.tokens)
        rows = vision.rows(picture)[first - picture.start : last - picture.start]
        found.append((first - chunk.start, rows))
    return found

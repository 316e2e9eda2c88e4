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
    visible_to = (inputs.positions + 1).int() if vision.spec.bidirectional else None
    begins = accumulate((chunk.length for chunk in chunks), initial=0)
    for begin, chunk in zip(begins, chunks, strict=False):
        for first, end, rows in _vectors_of(chunk, vision):
            own = slice(begin + first, begin + first + len(rows))
            indices.append(torch.arange(own.start, own.stop))
            vectors.append(rows)
            if visible_to is not None:
                visible_to[own] = end
    if not indices:
        return inputs
    replaced = torch.cat(indices).to(inputs.token_ids.device), torch.cat(vectors)
    return replace(inputs, replaced=replaced, visible_to=visible_to)


def _vectors_of(chunk: Chunk, vision: Vision) -> list[tuple[int, int, Tensor]]:
    """Returns, for each picture of which some is in a chunk, the first row there, the picture's end, and its vectors.

    The first row counts in the chunk, the end is a position, and the vectors are those in the chunk.
    """
    if chunk.sequence.pictures is None:
        return []
    end, found = chunk.start + chunk.length, []
    for picture in chunk.sequence.pictures.within(chunk.start, end):
        after = picture.start + picture.tokens
        first, last = max(chunk.start, picture.start), min(end, after)
        rows = vision.rows(picture)[first - picture.start : last - picture.start]
        found.append((first - chunk.start, after, rows))
    return found

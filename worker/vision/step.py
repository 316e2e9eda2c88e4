"""The rows of a step that images replace. A chunk may begin or end within an image."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.models.forward_inputs import ForwardInputs
from worker.scheduler.sequence import Chunk
from worker.vision.vision import Vision


def with_image_embeddings(inputs: ForwardInputs, chunks: Sequence[Chunk], vision: Vision) -> ForwardInputs:
    """Returns the inputs with the vectors of the placeholder tokens in these chunks. Encodes what is not cached."""
    indices, vectors = [], []
    bidirectional_end = (inputs.positions + 1).int() if vision.spec.bidirectional else None
    begins = accumulate((chunk.length for chunk in chunks), initial=0)
    for begin, chunk in zip(begins, chunks, strict=False):
        for places, end, rows in _vectors_of(chunk, vision):
            own = begin + places
            indices.append(own)
            vectors.append(rows)
            if bidirectional_end is not None:
                bidirectional_end[own] = end
    if vision.components is not None:
        inputs = _rotated(inputs, chunks, vision.components)
    if not indices:
        return inputs
    joined = torch.cat(vectors)
    embedded, *more = joined.view(len(joined), -1, vision.spec.text_size).unbind(1)
    replaced = torch.cat(indices).to(inputs.token_ids.device), embedded.contiguous()
    if vision.spec.stands_in is not None:
        inputs = replace(inputs, token_ids=inputs.token_ids.index_fill(0, replaced[0], vision.spec.stands_in))
    return replace(
        inputs, replaced=replaced, bidirectional_end=bidirectional_end, added=tuple(part.contiguous() for part in more)
    )


def _rotated(inputs: ForwardInputs, chunks: Sequence[Chunk], components: Tensor) -> ForwardInputs:
    """Returns the inputs with the three positions of each row. components: see attention.py"""
    positions = np.concatenate([_positions_of(chunk) for chunk in chunks], axis=1)
    device = inputs.positions.device
    columns = torch.from_numpy(positions)[components].T.contiguous()  # [T, D]
    return replace(inputs, rotary=columns.to(device), rope_rows=torch.arange(len(columns), device=device))


def _positions_of(chunk: Chunk) -> NDArray[np.int64]:
    end, images = chunk.start + chunk.length, chunk.sequence.images
    if images is None or images.rotary is None:
        return np.tile(np.arange(chunk.start, end), (3, 1))
    found: NDArray[np.int64] = images.rotary.between(chunk.start, end)
    return found


def _vectors_of(chunk: Chunk, vision: Vision) -> list[tuple[Tensor, int, Tensor]]:
    """Returns a tuple for each image that has tokens in a chunk.

    A tuple has the rows of the chunk that the image's vectors replace, the position after the image's last token,
    and these vectors.
    """
    if chunk.sequence.images is None:
        return []
    end, found = chunk.start + chunk.length, []
    for image in chunk.sequence.images.within(chunk.start, end):
        after = image.start + image.tokens
        first, last = max(chunk.start, image.start), min(end, after)
        places = vision.spec.places_of(image.height, image.width) + image.start
        begin, stop = np.searchsorted(places, (first, last))
        if begin < stop:  # else the chunk has only a token between two rows of the image
            rows = vision.rows(image)[begin:stop]
            found.append((torch.from_numpy(places[begin:stop] - chunk.start), after, rows))
    return found

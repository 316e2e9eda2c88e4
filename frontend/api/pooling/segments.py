"""Texts that are longer than the model can read, as the mean of the vectors of their segments.

A request asks for this with `long_inputs`; without it such a text is refused, or cut off where a field says so. A text
is cut into the fewest segments that the model can read, which differ by at most one token in length, because a short
rest would get a vector that says little. Each segment begins and ends with the tokens that the tokenizer puts around a
text, and has the checkpoint's prompt.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Annotated, Literal, NamedTuple

from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.request import Segments
from frontend.schema.base import in_slices
from frontend.schema.request_fields import doc
from shared.wire import pack_f32, unpack_f32

LongInputs = Annotated[  # the type of the field `long_inputs`
    Literal["mean"] | None,
    doc(
        "`mean`: a text longer than the model can read is cut into segments, and its vector is the mean of theirs; "
        "absent: the text is refused, unless another field says that it is cut off"
    ),
]


class SegmentedText(NamedTuple):
    """The ids of a text, of which the first `before` and the last `after` are repeated in each of its segments."""

    ids: list[int]
    before: int = 0
    after: int = 0


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many ids two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def segmented(
    texts: Sequence[SegmentedText], most_prompts: int, param: str, context: ModelContext
) -> tuple[list[list[int]], Segments]:
    """Cuts each text that is too long into segments. Returns the prompts, those of one text side by side.

    most_prompts: how many prompts a request may have
    param: the request field with the texts, for errors
    Raises Unprocessable if a segment has no place for the text's own tokens, or if there are too many segments.
    """
    most = context.max_seq_len
    prompts, counts, weights = list[list[int]](), list[int](), list[int]()
    for ids, before, after in texts:
        if len(ids) <= most or most < 1:
            counts.append(1)
            prompts.append(ids)
            weights.append(1)
            continue
        free, end = most - before - after, len(ids) - after
        if free < 1:
            raise Unprocessable(
                f"`long_inputs`: the prompt before each text and the tokenizer's own tokens have {before + after} "
                f"tokens, and the model can read {most}",
                param="long_inputs",
                code="out_of_range",
            )
        count = -(-(end - before) // free)
        if len(prompts) + count > most_prompts:
            raise Unprocessable(
                f"`{param}` makes more than {most_prompts} segments of up to {most} tokens", param=param,
                code="context_length_exceeded",
            )  # fmt: skip
        cuts = [before + (end - before) * at // count for at in range(count + 1)]
        for first, last in pairwise(cuts):
            prompts.append(ids[:before] + ids[first:last] + ids[end:])
            weights.append(last - first)
        counts.append(count)
    return prompts, Segments(tuple(counts), tuple(weights))


async def merged(packed: Sequence[bytes], segments: Segments, unit: bool) -> list[bytes]:
    """Returns one vector per text, as packed float32: the mean of its segments' vectors, weighted by their tokens.

    packed: the vectors of all segments; a text's only one is returned as it is, bit for bit
    unit: whether vectors get the length 1
    """
    found, at = list[bytes](), 0
    for count in segments.counts:
        found.append(packed[at] if count == 1 else await _mean(packed, range(at, at + count), segments.weights, unit))
        at += count
    return found


async def _mean(packed: Sequence[bytes], places: range, weights: Sequence[int], unit: bool) -> bytes:
    total = array("d", bytes(2 * len(packed[places.start])))  # a double has twice the bytes of a float32

    def add(place: int) -> None:
        weight = weights[place]
        for index, number in enumerate(unpack_f32(packed[place])):
            total[index] += weight * number

    await in_slices(places, add)  # in the order of the text, so that the sum has the same bits each time
    length = sqrt(sum([number * number for number in total])) if unit else sum(weights[place] for place in places)
    return pack_f32([number / length for number in total] if length else total)

"""Collects the vectors of a request from its deltas."""

from array import array
from dataclasses import dataclass
from math import sqrt

from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.errors import Internal
from frontend.request import Usage
from shared.wire.codec import unpack_f32


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How a response writes its vectors. norm: llama.cpp's `embd_normalize`; None: as the worker sent them"""

    base64: bool = False
    norm: int | None = None


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector per prompt, as packed float32, and the usage of all prompts together."""

    packed: list[bytes]
    usage: Usage

    def floats(self, index: int) -> "array[float]":
        return unpack_f32(self.packed[index])

    def cosine(self, one: int, other: int) -> float:
        """Returns the cosine of the angle between two vectors; 0 if one of them is zero."""
        a, b = self.floats(one), self.floats(other)
        lengths = sqrt(_dot(a, a)) * sqrt(_dot(b, b))
        return _dot(a, b) / lengths if lengths else 0.0


async def collect(context: ResponseContext, arriving: AsyncDeltas) -> Vectors:
    """Waits for all vectors of a request. Raises SluiceError if one of its prompts failed."""
    packed = [b""] * len(context.request.prompts)
    tokens = cached = 0
    async for deltas in arriving:
        for delta in deltas:
            packed[delta.index] = delta.extras.vector
            if delta.usage is not None:
                tokens, cached = tokens + delta.usage.prompt_tokens, cached + delta.usage.cached_tokens
    if not all(packed):
        raise Internal("the worker sent no vector", code="worker_error")
    return Vectors(packed, Usage(tokens, 0, cached))


def _dot(one: "array[float]", other: "array[float]") -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])

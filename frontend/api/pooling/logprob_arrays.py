"""The arrays of /v1/logprobs: packed log-probabilities from a worker, and their encodings for clients."""

import math
from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeVar

from msgspec import UNSET, Raw

from frontend.api.openai.token_details import LEAST
from frontend.api.pooling import response_types as types
from frontend.api.requests.encoding import JsonArray
from frontend.errors import Internal
from frontend.request import GenerationRequest
from shared.messages import Logprobs
from shared.wire.codec import pack_f32, pack_u32, unpack_f32, unpack_u32

T = TypeVar("T", int, float)

COUNTS = "X-Sluice-Token-Counts"
NO_LOGPROB, NO_ID = pack_f32([math.nan]), pack_u32([0])


@dataclass(frozen=True, slots=True)
class Arrays:
    """The packed log-probabilities of one row: N scored tokens of one prompt.

    If the row includes the first token of the prompt, which has no log-probability, `first` is 1. NaN then stands for
    the log-probability of this token, and NaN with the id 0 for each of the likeliest tokens at its position.
    """

    ids: list[int] | None  # ids of the tokens; None: not requested
    first: int
    count: int  # N
    top: int  # K, how many likeliest tokens are reported per token
    chosen: bytes  # [N] float32
    top_ids: bytes  # [N, K] uint32
    top_logprobs: bytes  # [N, K] float32

    @classmethod
    def of(cls, request: GenerationRequest, index: int, scores: Sequence[Logprobs]) -> Self:
        """Makes the arrays of a prompt. Raises Internal if the worker sent too few log-probabilities."""
        scored = request.features.scored
        assert scored is not None, "only requests for log-probabilities have arrays"
        prompt, start, top = request.prompts[index], scored.starts[index], request.sampling.prompt_top
        first, count = int(start == 0), len(prompt) - start
        chosen = first * NO_LOGPROB + b"".join([one.chosen for one in scores])
        if len(chosen) != 4 * count:
            raise Internal("the worker sent too few log-probabilities", code="worker_error")
        return cls(
            prompt[start:] if request.shown.ids else None, first, count, top, chosen,
            first * top * NO_ID + b"".join([one.top_ids for one in scores]),
            first * top * NO_LOGPROB + b"".join([one.top_logprobs for one in scores]),
        )  # fmt: skip


def as_lists(index: int, row: Arrays) -> types.ScoredTokens:
    """Returns the row as JSON arrays, with null for a token that has no log-probability."""
    top_ids: Any = UNSET
    top: Any = UNSET
    if row.top:
        top_ids = _encoded(row.first, _in_rows(unpack_u32(row.top_ids), row.top))
        top = _encoded(row.first, map(_finite, _in_rows(unpack_f32(row.top_logprobs), row.top)))
    chosen: Any = _encoded(row.first, _numbers(row.chosen))
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else row.ids,
        token_logprobs=chosen, top_token_ids=top_ids, top_logprobs=top,
    )  # fmt: skip


def _encoded(unknown: int, entries: Iterable[Any]) -> Raw:
    """Returns entries in JSON, with null for the first `unknown` of them. Encodes some hundreds at a time."""
    encoded = JsonArray()
    encoded.extend([None] * unknown)
    encoded.extend(islice(entries, unknown, None))
    return encoded.raw


def _in_rows(numbers: "array[T]", width: int) -> Iterator[list[T]]:
    return (numbers[at : at + width].tolist() for at in range(0, len(numbers), width))


def _numbers(packed: bytes) -> list[float]:
    """Returns the log-probabilities, with LEAST for minus infinity, which JSON cannot express."""
    return _finite(unpack_f32(packed).tolist())


def _finite(values: list[float]) -> list[float]:
    return [max(LEAST, value) for value in values] if -math.inf in values else values


def as_base64(index: int, row: Arrays) -> types.ScoredTokens:
    """Returns the row with each array as base64."""
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else _text(pack_u32(row.ids)),
        token_logprobs=_text(row.chosen), top_token_ids=_text(row.top_ids) if row.top else UNSET,
        top_logprobs=_text(row.top_logprobs) if row.top else UNSET,
    )  # fmt: skip


def _text(packed: bytes) -> str:
    return b64encode(packed).decode()


def as_bytes(rows: Sequence[Arrays]) -> types.Binary:
    """Returns the arrays one after another, each with the entries of all rows, and the rows' lengths in a header."""
    arrays = [
        *[pack_u32(row.ids) for row in rows if row.ids is not None], *[row.chosen for row in rows],
        *[row.top_ids for row in rows], *[row.top_logprobs for row in rows],
    ]  # fmt: skip
    return types.Binary(b"".join(arrays), {COUNTS: ",".join([str(row.count) for row in rows])})

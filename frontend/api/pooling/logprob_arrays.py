"""The arrays of /v1/logprobs: log-probabilities as a worker sends them, and the forms in which clients get them."""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from msgspec import UNSET, UnsetType

from frontend.api.openai.token_details import LEAST
from frontend.api.pooling import response_types as types
from frontend.errors import Internal
from frontend.request import GenerationRequest
from shared.messages import Logprobs
from shared.wire.codec import pack_f32, pack_u32, unpack_f32, unpack_u32

T = TypeVar("T")

COUNTS = "X-Sluice-Token-Counts"
NO_LOGPROB, NO_ID = pack_f32([math.nan]), pack_u32([0])


@dataclass(frozen=True, slots=True)
class Arrays:
    """What is known of the N tokens of a row, packed. `first` is 1 if the row begins with a prompt's first token, which
    has no log-probability: NaN stands for it, and for each of its likeliest tokens with the id 0."""

    ids: list[int] | None  # of the tokens, if asked for
    first: int
    count: int  # N
    top: int  # K, how many of the likeliest tokens
    chosen: bytes  # [N] float32
    top_ids: bytes  # [N, K] uint32
    top_logprobs: bytes  # [N, K] float32

    @classmethod
    def of(cls, request: GenerationRequest, index: int, scores: Sequence[Logprobs]) -> Self:
        """Makes the arrays of a prompt. Raises Internal unless each token has a log-probability."""
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
    """Returns the row as arrays of numbers, with null for a token without log-probability."""
    unknown: list[None] = [None] * row.first
    top_ids: list[list[int] | None] | UnsetType = UNSET
    top: list[list[float] | None] | UnsetType = UNSET
    if row.top:
        ids, values = unpack_u32(row.top_ids).tolist(), _numbers(row.top_logprobs)
        top_ids = unknown + _in_rows(ids, row.top)[row.first :]
        top = unknown + _in_rows(values, row.top)[row.first :]
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else row.ids,
        token_logprobs=unknown + _numbers(row.chosen)[row.first :], top_token_ids=top_ids, top_logprobs=top,
    )  # fmt: skip


def _in_rows(numbers: list[T], width: int) -> list[list[T]]:
    return [numbers[at : at + width] for at in range(0, len(numbers), width)]


def _numbers(packed: bytes) -> list[float]:
    """Returns the log-probabilities with LEAST instead of minus infinity, which JSON cannot express."""
    values = unpack_f32(packed).tolist()
    return [max(LEAST, value) for value in values] if -math.inf in values else values


def as_base64(index: int, row: Arrays) -> types.ScoredTokens:
    """Returns the row with the base64 of each array."""
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else _text(pack_u32(row.ids)),
        token_logprobs=_text(row.chosen), top_token_ids=_text(row.top_ids) if row.top else UNSET,
        top_logprobs=_text(row.top_logprobs) if row.top else UNSET,
    )  # fmt: skip


def _text(packed: bytes) -> str:
    return b64encode(packed).decode()


def as_bytes(rows: Sequence[Arrays]) -> types.Binary:
    """Returns the arrays of all rows, each array with its rows one after another, and the rows' lengths in a header."""
    arrays = [
        *[pack_u32(row.ids) for row in rows if row.ids is not None], *[row.chosen for row in rows],
        *[row.top_ids for row in rows], *[row.top_logprobs for row in rows],
    ]  # fmt: skip
    return types.Binary(b"".join(arrays), {COUNTS: ",".join([str(row.count) for row in rows])})

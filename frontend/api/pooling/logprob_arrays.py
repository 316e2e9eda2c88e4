"""The arrays of /v1/logprobs: packed log-probabilities from a worker, and their encodings for clients."""

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
    """Returns the log-probabilities, with LEAST for minus infinity, which JSON cannot express."""
    values = unpack_f32(packed).tolist()
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

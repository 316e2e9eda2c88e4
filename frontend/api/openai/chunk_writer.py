"""Token ids and the prompt's log-probabilities in responses of completions and chats, with vLLM's field names."""

from itertools import islice
from typing import TYPE_CHECKING, cast

from msgspec import UNSET, UnsetType

from frontend.api.openai.response_types import PromptLogprob, PromptLogprobs
from frontend.api.requests.encoding import JsonArray, in_slices, to_json
from frontend.api.response_context import ResponseContext
from frontend.request import Delta, TokenLogprob

if TYPE_CHECKING:
    from frontend.api.requests.telemetry import TelemetryEvents

LEAST = -9999.0  # OpenAI's value for a log-probability of minus infinity, which JSON cannot express


def prompt_ids(context: ResponseContext, choice: int) -> list[int] | UnsetType:
    """Returns the ids of a choice's prompt if the request asks for token ids, else UNSET."""
    request = context.request
    return request.prompts[choice // request.n] if request.shown.ids else UNSET


def output_ids(context: ResponseContext, ids: list[int]) -> list[int] | UnsetType:
    """Returns `ids` if the request asks for token ids, else UNSET."""
    return ids if context.request.shown.ids else UNSET


async def prompt_logprobs(context: ResponseContext, last: Delta | None) -> PromptLogprobs | UnsetType:
    """Returns the log-probabilities of a choice's prompt, encoded in slices; UNSET if none are requested.

    last: the choice's last delta
    """
    scores = None if last is None else last.extras.prompt_logprobs
    if scores is None:
        return UNSET
    entries = JsonArray(each=16)
    entries.append(None)
    await in_slices(islice(scores, 1, None), lambda token: entries.append(_entry(context, token)))
    return cast(PromptLogprobs, entries.raw)


def _entry(context: ResponseContext, token: TokenLogprob) -> dict[int, PromptLogprob]:
    text = context.tokenizer.token_text
    ranked = [(token.token_id, token.logprob, token.rank)]
    ranked += [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, 1) if id != token.token_id]
    return {
        id: PromptLogprob(logprob=max(LEAST, logprob), rank=rank, decoded_token=text(id))
        for id, logprob, rank in ranked
    }  # fmt: skip


def telemetry_events(context: ResponseContext, opening: int) -> "TelemetryEvents | None":
    """Returns an object that adds llama.cpp's fields to the events of a stream; None if none are requested."""
    asked = context.request.shown.telemetry
    if asked is None:
        return None
    from frontend.api.requests.telemetry import TelemetryEvents

    return TelemetryEvents(asked, context.request.prompt_tokens, opening)


def as_fields(name: str, ids: list[int] | UnsetType) -> bytes:
    """Encodes ids as one more field of a JSON object that is written in pieces; empty for UNSET."""
    return b"" if ids is UNSET else b',"%s":%s' % (name.encode(), to_json(ids))

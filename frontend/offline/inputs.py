"""A Python caller's prompts, conversations and options as Asks, read by the tables of the HTTP dialects.

So what is valid, what a default is and what an error says are the same on both roads. Knows nothing of running them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from frontend.api.common import ModelContext
from frontend.api.decoding import convert
from frontend.api.openai import chat, completions
from frontend.api.openai.completions_input import MAX_PROMPTS
from frontend.request import GenerationRequest

Prompt = str | list[int]
Prompts = list[str] | list[list[int]] | list[Prompt]
Messages = list[dict[str, Any]]
Chats = list[Messages]
Read = Callable[[ModelContext], Awaitable[list[GenerationRequest]]]

SLICE = MAX_PROMPTS  # prompts that one body may have


class Sampled(TypedDict, total=False):
    """How tokens are chosen and when an answer ends; what is left out or None has the HTTP API's default."""

    max_tokens: int | None
    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    response_format: Mapping[str, Any] | None  # one of these six says what an answer must look like
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    structured_outputs: Mapping[str, Any] | None
    cache_salt: str | None  # the prefix cache is shared with equals only
    priority: int | None  # lower goes first
    deadline_ms: int | None  # the whole answer must be there by then


class Options(Sampled, total=False):
    """Of a completion: 128 tokens at most unless `max_tokens` says otherwise."""

    logprobs: int | None  # the chosen token's and as many of its rivals'


class ChatOptions(Sampled, total=False):
    """Of a chat: to the context's end unless `max_tokens` says otherwise."""

    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None  # a call is in the answer's text, in the model's own words
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def several_prompts(given: Prompt | Prompts) -> tuple[list[Prompt], bool]:
    """A list of prompts in any case, and whether it was a single one."""
    one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    return ([given] if one else list(given)), one  # type: ignore[list-item, arg-type]


def several_chats(given: Messages | Chats) -> tuple[Chats, bool]:
    """The same for conversations."""
    one = len(given) > 0 and isinstance(given[0], Mapping)
    return ([given] if one else list(given)), one  # type: ignore[list-item, arg-type]


def of_prompts(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> Read:
    """One Ask a prompt. Raises TypeError for an option that a completion does not have; reading raises SluiceError."""
    body = _body(options, Options)
    entries = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    async def read(context: ModelContext) -> list[GenerationRequest]:
        requests: list[GenerationRequest] = []
        for at in range(0, len(entries), SLICE):
            whole = {**body, "model": context.model, "prompt": entries[at : at + SLICE]}
            request = await completions.parse(convert(whole, completions.REQUEST), context)
            requests += [replace(request, prompts=(ids,)) for ids in request.prompts]
        return requests

    return read


def of_chats(chats: Chats, options: Mapping[str, Any]) -> Read:
    """One Ask a conversation; the rest as `of_prompts`."""
    body = _body(options, ChatOptions)
    entries = [list(map(dict, messages)) for messages in chats]

    async def read(context: ModelContext) -> list[GenerationRequest]:
        return [
            await chat.parse(convert({**body, "messages": messages}, chat.REQUEST), context) for messages in entries
        ]

    return read


def _body(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """As JSON would have it."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"there is no option {', '.join(map(repr, sorted(unknown)))}")
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    match value:
        case tuple():
            return list(value)
        case Mapping():
            return {str(key): entry for key, entry in value.items()}
        case _:
            return value

"""Makes GenerationRequests from a Python caller's prompts, conversations and options, with the HTTP API's own parsers.

Validation, defaults and error messages are therefore the same in Python and over HTTP. Runs no requests.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from frontend.api.openai import chat, completions
from frontend.api.openai.completions_input import MAX_PROMPTS
from frontend.api.requests.decoding import convert
from frontend.offline.contexts import ContextOf
from frontend.request import GenerationRequest

Prompt = str | list[int]
Prompts = list[str] | list[list[int]] | list[Prompt]
Messages = list[dict[str, Any]]
Chat = Messages | str
Chats = list[Messages] | list[str] | list[Chat]
ReadRequests = Callable[[ContextOf], Awaitable[list[GenerationRequest]]]

SLICE = MAX_PROMPTS  # how many prompts one request body may have


class CommonOptions(TypedDict, total=False):
    """How tokens are chosen and when an output ends; an option that is absent or None has the HTTP API's default."""

    adapter: str | None  # a LoRA adapter by its name in the setting lora_modules; None: no adapter
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
    response_format: Mapping[str, Any] | None  # at most one of the six fields from here on may be set
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    structured_outputs: Mapping[str, Any] | None
    cache_salt: str | None  # requests share cached prefixes only if they have the same salt
    priority: int | None  # lower values are served first
    deadline_ms: int | None  # the whole output must be complete within this time


class Options(CommonOptions, total=False):
    """Options of a completion; `max_tokens` is 128 by default."""

    logprobs: int | None  # log-probabilities of the chosen token and of this many likely alternatives


class ChatOptions(CommonOptions, total=False):
    """Options of a chat; `max_tokens` reaches to the end of the context by default."""

    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None  # calls stay in the output's text, as the model writes them
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def as_prompts(prompts: Prompt | Prompts) -> tuple[list[Prompt], bool]:
    """Returns the prompts as a list, and whether a single prompt was passed."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return ([prompts] if single else list(prompts)), single  # type: ignore[list-item, arg-type]


def as_chats(chats: Chat | Chats) -> tuple[list[Messages], bool]:
    """Returns the conversations as a list, and whether a single one was passed. A text is a message of the user."""
    single = isinstance(chats, str) or (len(chats) > 0 and isinstance(chats[0], Mapping))
    every = [chats] if single else list(chats)
    return [_user_says(chat) if isinstance(chat, str) else chat for chat in every], single  # type: ignore[misc]


def _user_says(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def prompt_requests(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> ReadRequests:
    """Returns a function that makes one request per prompt.

    Raises TypeError for an option that a completion does not have. The returned function raises SluiceError for
    invalid values.
    """
    adapter, body = _body(options, Options)
    entries = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]

    async def read(context_of: ContextOf) -> list[GenerationRequest]:
        context, requests = context_of(adapter), list[GenerationRequest]()
        for at in range(0, len(entries), SLICE):
            prompts_body = {**body, "model": context.model, "prompt": entries[at : at + SLICE]}
            request = await completions.parse(convert(prompts_body, completions.REQUEST), context)
            requests += [replace(request, prompts=(ids,)) for ids in request.prompts]
        return requests

    return read


def chat_requests(chats: list[Messages], options: Mapping[str, Any]) -> ReadRequests:
    """Returns a function that makes one request per conversation. Raises as `prompt_requests` does."""
    adapter, body = _body(options, ChatOptions)

    async def read(context_of: ContextOf) -> list[GenerationRequest]:
        context = context_of(adapter)
        entries = [_as_body(messages) for messages in chats]
        return [
            await chat.parse(convert({**body, "messages": messages}, chat.REQUEST), context) for messages in entries
        ]

    return read


def _as_body(messages: Messages) -> Messages:
    """Returns the messages in the form of a JSON body. Raises BadRequest for a picture that cannot be read."""
    if all(isinstance(message.get("content"), str) for message in messages):
        return list(map(dict, messages))
    from frontend.offline.pictures import with_urls

    return list(map(with_urls, messages))


def _body(options: Mapping[str, Any], kind: type) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of the adapter, and the other options in the form of a JSON body."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"there is no option {', '.join(map(repr, sorted(unknown)))}")
    return options.get("adapter"), {name: _as_json(value) for name, value in options.items() if name != "adapter"}


def _as_json(value: Any) -> Any:
    match value:
        case tuple():
            return list(value)
        case Mapping():
            return {str(key): entry for key, entry in value.items()}
        case _:
            return value

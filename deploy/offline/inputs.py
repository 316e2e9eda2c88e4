"""Makes GenerationRequests from a Python caller's prompts, conversations and options, with the HTTP API's own parsers.

Validation, defaults and error messages are therefore the same in Python and over HTTP. Runs no requests.
"""

import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from frontend.api.openai import chat, completions
from frontend.api.openai.completions import MAX_PROMPTS
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.decoding import convert
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.images import data_url, file_as_url
from shared.messages import Adapter

# Chooses the ModelContext for reading a Python caller's request: of the model, or of the model with an adapter.

ContextOf = Callable[[str | None], ModelContext]  # the argument: an adapter's name; None: no adapter


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of an `LLM`. base: for the model without an adapter; adapters: the setting lora_modules, by name"""

    base: ModelContext
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def of(self, adapter: str | None) -> ModelContext:
        """Returns the context of the model with this adapter. Raises Unprocessable for an unknown name."""
        if adapter is None:
            return self.base
        found = self.adapters.get(adapter)
        if found is None:
            known = ", ".join(map(repr, self.adapters)) or "none: name them with lora_modules"
            raise Unprocessable(
                f"`adapter`: there is no adapter {adapter!r}; there are {known}",
                param="adapter",
                code="model_not_found",
            )
        return replace(self.base, model=adapter, names=frozenset((adapter,)), adapter=found)

    def of_model(self, name: str) -> ModelContext:
        """Returns the context of an answer whose `model` is `name`: an adapter's, or else the base model's."""
        return self.of(name if name in self.adapters else None)


def adapters_of(model: ModelConfig, worker: WorkerConfig) -> Mapping[str, Adapter]:
    """Reads the files of the adapters that the settings name. Raises ConfigError."""
    if not model.lora_modules:
        return {}
    from frontend.lora import AdapterRegistry

    return AdapterRegistry(model, max_rank=worker.max_lora_rank).adapters


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
    """Returns the messages in the form of a JSON body. Raises BadRequest for an image that cannot be read."""
    if all(isinstance(message.get("content"), str) for message in messages):
        return list(map(dict, messages))

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


# Turns images in a Python caller's conversations (Pillow images, paths) into the parts that the HTTP API takes.

KINDS = ("image", "image_pil")  # types of parts with an image, which is in the field of the same name
MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # Pillow's modes of the images that a PNG can hold


def with_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose images are data: URLs. Raises BadRequest for an image that cannot be read."""
    content = message.get("content")
    parts = [_with_url(part) for part in content] if isinstance(content, list | tuple) else content
    return {**message, "content": parts}


def _with_url(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in KINDS or part.get(kind) is None:
        return part
    image = part[kind]
    try:
        url = file_as_url(Path(image)) if isinstance(image, str | PathLike) else _encoded(image)
    except ValueError as error:
        name = str(image) if isinstance(image, str | PathLike) else "an image"
        raise BadRequest(f"`messages`: {name} {error}", param="messages", code="invalid_image") from error
    return {"type": "image_url", "image_url": {"url": url}}


def _encoded(image: Any) -> str:
    """Returns a Pillow image as a data: URL of a PNG, lossless and with its EXIF orientation."""
    if not (hasattr(image, "save") and hasattr(image, "convert")):
        raise ValueError(f"is a {type(image).__name__}, neither an image of Pillow nor a path")
    file, exif = io.BytesIO(), image.getexif()
    fitting = image if image.mode in MODES else image.convert("RGB")
    fitting.save(file, "PNG", compress_level=1, **({"exif": exif} if exif else {}))
    return data_url(file.getvalue())

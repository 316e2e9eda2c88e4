"""Facts about the model that are needed to read requests, and checks of requests against them. Knows no API format."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from frontend.errors import BadRequest, ContextLengthExceeded, SluiceError, Unprocessable, unknown_model
from frontend.output_parser.model_format import ModelFormat
from frontend.schema.base import fields_of
from frontend.schema.decoding import reader, refuse_unknown
from frontend.schema.request_fields import GenerationFields, OpenAIFields
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.build import fingerprint_of
from shared.checkpoint import GENERATE, Task
from shared.config.frontend import FrontendConfig
from shared.messages import Adapter, Limits
from shared.preset import Preset


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Facts about the model that are needed to read a request."""

    model: str  # the served name, which responses state
    max_seq_len: int  # prompt and output tokens together; 0: no limit, or no worker has reported it yet
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate
    stream_format: str = "openai"  # the event format of /v1/completions, if the body selects none
    style: ModelFormat = field(default_factory=ModelFormat)  # how the model writes reasoning and tool calls
    recommended: Mapping[str, Any] = field(default_factory=dict)  # defaults of sampling, from generation_config.json
    names: frozenset[str] = frozenset()  # the model's other names
    any_name: bool = False  # whether every name is accepted as this model's
    task: Task = GENERATE
    hidden_size: int = 0  # dimensions of an embedding; 0: no worker has reported it yet
    trusts_templates: bool = False  # whether a request may bring its own chat template
    special_tokens_in_content: bool = False  # whether text like <|im_end|> in a message becomes that token
    adapter: Adapter | None = None  # the LoRA adapter of the requests
    config: FrontendConfig = field(default_factory=FrontendConfig)  # the settings
    lifted: int = 0  # the `max_seq_len` of a context whose limit was lifted
    text_fingerprint: str = ""  # a hash of how prompts are made, see shared/build.py
    preset: Preset | None = None  # what a name that was made with /api/create adds
    stops: tuple[str, ...] = ()  # the stop strings of requests that have none
    most_new: int | None = None  # the limit on new tokens of requests that have none

    @classmethod
    def of(cls, names: Sequence[str], tokenizer: Tokenizer, config: FrontendConfig) -> Self:
        """Returns the context before any worker has reported its limits."""
        template = ChatTemplate(
            tokenizer.templates, tokenizer.named_tokens, supports_vision=tokenizer.image_format is not None
        )
        style = ModelFormat.of(tokenizer.templates, config.tool_format, config.reasoning_format, template.render)
        style = replace(style, drifts=config.drifting_calls)
        defaults = recommended(tokenizer.generation) if config.sampling_defaults == "model" else {}
        return cls(
            names[0], 0, tokenizer.vocab_size, tokenizer, template,
            config.completions_stream_format, style, defaults, frozenset(names), config.any_model_name, tokenizer.task,
            trusts_templates=config.trust_request_chat_template,
            special_tokens_in_content=config.special_tokens_in_content,
            config=config,
            text_fingerprint=text_fingerprint(tokenizer, style, defaults, config.special_tokens_in_content),
        )  # fmt: skip

    @property
    def unlimited(self) -> Self:
        """The same context without a length limit, for a prompt that is only counted or will be shortened."""
        return replace(self, max_seq_len=0, lifted=self.max_seq_len)

    @property
    def longest(self) -> int:
        """The model's longest sequence in tokens, also if the limit is lifted; 0: not known yet."""
        return max(self.max_seq_len, self.lifted)

    def fingerprint_with(self, worker: str) -> str:
        """Returns the fingerprint of answers from workers with the fingerprint `worker`; "" if `worker` is ""."""
        base = combined(worker, self.text_fingerprint) if worker else ""
        return combined(base, self.adapter.identity) if base and self.adapter is not None else base

    def with_preset(self, name: str, preset: Preset) -> Self:
        """Returns the context of a name that was made for this model, with the defaults of `preset`."""
        template, style = self.template, self.style
        if preset.template:
            templates = {"default": preset.template}
            template = ChatTemplate(
                templates, self.tokenizer.named_tokens, supports_vision=self.tokenizer.image_format is not None
            )
            config = self.config
            style = ModelFormat.of(templates, config.tool_format, config.reasoning_format, template.render)
            style = replace(style, drifts=config.drifting_calls)
        defaults = preset_defaults(preset.parameters)
        facts = [self.text_fingerprint, preset.system, preset.template, preset.parameters, preset.messages]
        return replace(
            self, model=name, names=frozenset({name}), preset=preset, template=template, style=style,
            recommended={**self.recommended, **defaults.sampling}, stops=defaults.stops, most_new=defaults.most_new,
            text_fingerprint=self.text_fingerprint if preset.is_plain else fingerprint_of(facts),
        )  # fmt: skip

    def at(self, seconds: float) -> Self:
        """Returns the context for a request that arrived at `seconds` since 1970, for templates that write the date."""
        if not (self.template.writes_date or self.trusts_templates):
            return self
        return replace(self, template=self.template.at(seconds))

    def within(self, limits: Limits | None) -> Self:
        """Returns the context with a worker's limits; an unchanged context if no worker has reported limits."""
        if limits is None:
            return self
        return replace(
            self, max_seq_len=limits.max_seq_len, vocab_size=limits.vocab_size, hidden_size=limits.hidden_size
        )


def check_model(name: str | None, context: ModelContext) -> None:
    """Raises UnknownModel if `name` is not a name of the model. None and "" are accepted."""
    if name and name != context.model and name not in context.names and not context.any_name:
        raise unknown_model(name, context.model)


def check_task(what: str, tasks: Sequence[str], context: ModelContext) -> None:
    """Raises BadRequest if the server's task is not one of `tasks`. what: the route or method, for the message"""
    if context.task.name not in tasks:
        raise BadRequest(
            f"{what} needs a server with --task {' or '.join(tasks)}; this one serves --task {context.task.name}",
            code="task_not_served",
        )


def check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises Unprocessable, which names the first id outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        id = next(id for id in ids if not 0 <= id < vocab_size)
        raise Unprocessable(
            f"`{name}` has the token id {id}, outside 0 to {vocab_size - 1}", param=name, code="out_of_range"
        )


# The frontend's part of the fingerprint: a hash of how prompts are made, and of how the output is parsed.

TEXT_VERSION = 4  # raise it with every change that may alter the prompt or the answer of an unchanged request


def text_fingerprint(
    tokenizer: Tokenizer, style: ModelFormat, defaults: Mapping[str, Any], specials_in_content: bool = False
) -> str:
    """Returns the frontend's part of the fingerprint.

    defaults: the sampling parameters of a request that sets none
    specials_in_content: whether text like <|im_end|> in a message becomes a special token
    """
    facts = [tokenizer.hash, tokenizer.templates, tokenizer.named_tokens, tokenizer.eos_ids, style, defaults]
    return fingerprint_of([TEXT_VERSION, *facts, specials_in_content])


@lru_cache(maxsize=256)  # every answer asks for one of a few
def combined(worker: str, text: str) -> str:
    """Returns the fingerprint that clients see. worker, text: the worker's part and the frontend's part"""
    return fingerprint_of([worker, text])


# The sampling parameters that a checkpoint recommends, as defaults of requests.

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # other recommendations are ignored


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters in a checkpoint's generation_config.json; none if it turns sampling off.

    A value that a request could not have is ignored.
    """
    if generation.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name in RECOMMENDED:
        with suppress(SluiceError):
            if (value := generation.get(name)) is not None:
                found[name] = reader(fields_of(OpenAIFields)[name].type)(value, name, refuse_unknown)
    return found


# The defaults of a name that was made with /api/create, from Ollama's names of its parameters.

# Ollama's name → the name of the sampling parameter
PRESET_SAMPLING: Mapping[str, str] = {
    "temperature": "temperature", "top_p": "top_p", "min_p": "min_p", "top_k": "top_k",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "seed": "seed",
}  # fmt: skip
RANDOM_SEED = -1  # Ollama's own default of `seed`


class PresetDefaults(NamedTuple):
    """The defaults of requests that do not state these things. most_new: tokens; None: no limit"""

    sampling: dict[str, Any]
    stops: tuple[str, ...]
    most_new: int | None


def preset_defaults(parameters: Mapping[str, Any]) -> PresetDefaults:
    """Returns what the parameters of a preset mean. They were checked when it was made; others have no effect."""
    sampling = {known: parameters[name] for name, known in PRESET_SAMPLING.items() if name in parameters}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])
    if sampling.get("seed") == RANDOM_SEED:
        del sampling["seed"]
    stop, most = parameters.get("stop", ()), parameters.get("num_predict", -1)
    return PresetDefaults(sampling, (stop,) if isinstance(stop, str) else tuple(stop), most if most > 0 else None)


# Checks that a prompt fits the model's context, and words the refusal if it does not.
#
# The message is worded like OpenAI's, because clients parse it to learn that a conversation is too long, and by how
# much. Anthropic's format writes its own message from the same numbers (anthropic/messages.py).

MOST_COUNTED = 1 << 20  # characters of a text that no context limits; the tokenizer needs 0.2 KB for each
CHARACTERS_A_TOKEN = 8  # a context of T tokens holds a text of this many characters per token, unless it is unusual


def check_length(param: str, prompt: int, output: int, context: ModelContext) -> None:
    """Raises ContextLengthExceeded if the context cannot hold `prompt` prompt tokens and `output` new tokens.

    param: the request field that holds the prompt
    """
    most = context.max_seq_len
    if prompt > most:
        raise _exceeded(
            f"{prompt} tokens in the {param}. Please reduce the length of the {param}.", param, prompt, 0, most
        )
    if prompt + output > most:
        raise _exceeded(
            f"{prompt + output} tokens ({prompt} in the {param}, {output} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param, prompt, output, most,
        )  # fmt: skip


def check_counted(param: str, length: int, context: ModelContext) -> None:
    """Raises Unprocessable for a text that is only counted or tokenized, if it is so long that this would take too much
    memory: 0.2 KB a character.

    length: of the text in characters, or of ids
    """
    most = max(MOST_COUNTED, CHARACTERS_A_TOKEN * context.longest)
    if length > most:
        raise Unprocessable(
            f"`{param}` is {length} long; at most {most} characters or ids are counted or tokenized at once",
            param=param, code="out_of_range",
        )  # fmt: skip


def check_characters(param: str, text: str, context: ModelContext) -> None:
    """Raises ContextLengthExceeded for a text with so many characters that no tokenization of it can fit.

    This check comes before tokenization, which takes seconds for a text of megabytes. If `max_seq_len` is 0, the limit
    is that of `check_counted`.
    """
    most = context.max_seq_len
    if not most:
        check_counted(param, len(text), context)
    # a text of `most` characters or fewer always fits, because each token has at least one character
    least = context.tokenizer.fewest_tokens(text, most) if 0 < most < len(text) else 0
    if least > most:
        raise _exceeded(
            f"at least {least} tokens in the {param}. Please reduce the length of the {param}.",
            param, least, 0, most, at_least=True,
        )  # fmt: skip


def _exceeded(
    requested: str, param: str, prompt: int, output: int, limit: int, at_least: bool = False
) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, you requested {requested}",
        param=param, code="context_length_exceeded",
        prompt=prompt, output=output, limit=limit, at_least=at_least,
    )  # fmt: skip


# Shortens a prompt if the request allows it (`truncate_prompt_tokens`, `truncation_side`).


def before_truncation(kept: int | None, context: ModelContext) -> ModelContext:
    """Returns the context for reading a prompt: without a length limit if the prompt will be shortened to `kept`."""
    return context if kept is None else context.unlimited


def truncated(ids: list[int], most: int | None, fields: GenerationFields, context: ModelContext) -> list[int]:
    """Returns the last `truncate_prompt_tokens` ids of a prompt; all of them if the field is absent.

    -1 keeps as many ids as leave room for the answer. `truncation_side` "right" keeps the first ids.

    most: the limit on new tokens; None or negative: there is none
    """
    kept = getattr(fields, "truncate_prompt_tokens", None)
    if kept is None:
        return ids
    if kept == 0 or kept > context.max_seq_len:
        raise Unprocessable(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {context.max_seq_len}, got {kept}",
            param="truncate_prompt_tokens", code="out_of_range",
        )  # fmt: skip
    if kept < 0 and (kept := context.max_seq_len - max(1, most or 1)) <= 0:
        return ids  # check_length then refuses the request, because the answer alone is too long
    return ids[:kept] if getattr(fields, "truncation_side", None) == "right" else ids[-kept:]

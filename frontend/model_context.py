"""Facts about the model that are needed to read requests, and checks of requests against them. Knows no API format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from frontend.api.fingerprint import combined, text_fingerprint
from frontend.api.recommended import recommended
from frontend.errors import BadRequest, Unprocessable
from frontend.output_parser.formats import ModelFormat
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.config import FrontendConfig
from shared.messages import Adapter, Limits
from shared.task import GENERATE, Task


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
    text_fingerprint: str = ""  # a hash of how prompts are made, see fingerprint.py

    @classmethod
    def of(cls, names: Sequence[str], tokenizer: Tokenizer, config: FrontendConfig) -> Self:
        """Returns the context before any worker has reported its limits."""
        template = ChatTemplate(tokenizer.templates, tokenizer.named_tokens, sees=tokenizer.pictures is not None)
        style = ModelFormat.of(tokenizer.templates, config.tool_format, config.reasoning_format, template.render)
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
        """The same context without a length limit, for a prompt whose tokens are only counted."""
        return replace(self, max_seq_len=0, lifted=self.max_seq_len)

    @property
    def longest(self) -> int:
        """The model's longest sequence in tokens, also if the limit is lifted; 0: not known yet."""
        return max(self.max_seq_len, self.lifted)

    def fingerprint_with(self, worker: str) -> str:
        """Returns the fingerprint of answers from workers with the fingerprint `worker`; "" if `worker` is ""."""
        base = combined(worker, self.text_fingerprint) if worker else ""
        return combined(base, self.adapter.identity) if base and self.adapter is not None else base

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
    """Raises Unprocessable if `name` is not a name of the model. None and "" are accepted."""
    if name and name != context.model and name not in context.names and not context.any_name:
        raise Unprocessable(
            f"`model`: the model `{name}` does not exist; this server serves `{context.model}`",
            param="model",
            code="model_not_found",
        )


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

"""The JSON of Ollama's API: the fields that /api/chat and /api/generate share, messages, and responses."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.openai.response_types import TokenLogprobs
from frontend.api.receipts import Receipt
from frontend.api.request_builder import ParsedRequest
from frontend.chat.history import ChatMessage, call, chat_message
from frontend.chat.prompt import Prompt, render_prompt
from frontend.chat.reasoning import effort, thinking
from frontend.model_context import RANDOM_SEED, ModelContext
from frontend.output_parser.model_format import Function, ToolChoice
from frontend.schema.base import MOST, Names, RequestModel, ResponseModel
from frontend.schema.request_fields import (
    UNLIMITED,
    Factor,
    Mirostat,
    MirostatEta,
    MirostatTau,
    Penalty,
    RepeatLastN,
    SamplerFields,
    Seed,
    Share,
    StopText,
    StopTexts,
    Temperature,
    TemplateArguments,
    Text,
    TypicalP,
    check_seed,
    check_stops,
    doc,
)
from frontend.schema.responses import Capability, Size
from frontend.structured_output.fields import Kind, StructuredOutput
from frontend.text.chat_template import Source, base64_source, found_in, within
from shared.model_list import MOST_S

Unlimited = Annotated[int, Meta(ge=-2, le=MOST)]  # 0 and negative values: no limit
SEED_BITS = 53  # of a drawn seed: JavaScript represents so many exactly
OllamaModelName = Annotated[Text, doc("The served name, see `/api/tags`; `:latest` may follow it")]


class Options(RequestModel):
    """Ollama's options of a model. Options for loading are accepted without effect, because the model is loaded."""

    ONLY: ClassVar = {
        "tfs_z": (1.0,),
        "penalize_newline": (True,),
    }
    IGNORED: ClassVar[Names] = (
        "num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
    )  # fmt: skip

    temperature: Temperature | None = None
    top_k: Unlimited | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Unlimited | None = None
    stop: StopText | StopTexts | None = None
    repeat_penalty: Factor | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: RepeatLastN = None
    typical_p: TypicalP = None
    mirostat: Mirostat = None
    mirostat_eta: MirostatEta = None
    mirostat_tau: MirostatTau = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_stops("stop", self.stop)

    @property
    def limit(self) -> int | None:
        """The limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
        return self.num_predict if self.num_predict is None or self.num_predict > 0 else UNLIMITED

    @property
    def _seed(self) -> int | None:
        """The seed; a drawn one for -1, because None would be the seed of a name that has one."""
        return secrets.randbits(SEED_BITS) if self.seed == RANDOM_SEED else self.seed

    def fields(self, **more: Any) -> SamplerFields:
        """Returns the options under OpenAI's names. more: fields for which Ollama has no option"""
        return SamplerFields(
            temperature=self.temperature, top_k=None if self.top_k is None else max(0, self.top_k), top_p=self.top_p,
            min_p=self.min_p, seed=self._seed, stop=self.stop or None,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n, typical_p=self.typical_p, mirostat=self.mirostat,
            mirostat_tau=self.mirostat_tau, mirostat_eta=self.mirostat_eta, **more,
        )  # fmt: skip


_Duration = Annotated[str, Meta(pattern=r"^-?(\d{1,12}(\.\d{1,9})?|(\d{1,12}(\.\d{1,9})?(ms|s|m|h))+)$")]
KeepAlive = Annotated[
    Annotated[float, Meta(le=MOST_S)] | _Duration | None,
    doc("How long the model stays loaded, where there are many: `90s`, `1h30m`, seconds; negative: for ever"),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The data of a request that its response repeats."""

    model: str  # the name that the client wrote
    before: list[int] | None = None  # ids of the prompt; None: not reported


class AnswerFields(RequestModel):
    """The fields of both /api/chat and /api/generate."""

    model: OllamaModelName
    stream: Annotated[bool, doc("false: one object instead of lines")] = True
    options: Annotated[Options | None, doc("Sampling, `num_predict` (tokens of the answer) and `stop`")] = None
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None, doc("`json`, or a JSON schema that the answer keeps to")
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None,
        doc("Whether to think, and how much if a model knows degrees"),
    ] = None
    chat_template_kwargs: TemplateArguments = None
    logprobs: Annotated[bool, doc("Log-probabilities of the answer's tokens")] = False
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, doc("With `logprobs`: how many likeliest tokens to report per token")
    ] = None
    receipt: Annotated[bool, doc("Add `receipt`, with which `/v1/receipts/verify` checks the answer")] = False
    keep_alive: KeepAlive = None

    @property
    def chosen(self) -> Options:
        return self.options or Options()

    def reading(self, param: str, tool_choice: ToolChoice | None, before: list[int] | None = None) -> ParsedRequest:
        """Returns the request in the form that all API formats share.

        param: the request field that holds the prompt
        before: the ids of the prompt, if the response reports them
        """
        return ParsedRequest(
            self.chosen.fields(stream=self.stream, receipt=self.receipt), param, self.chosen.limit,
            "options.num_predict", ends_with_context=True, tool_choice=tool_choice, form=self.form,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            format_data=Asked(self.model, before),
        )  # fmt: skip

    def template_arguments(self, context: ModelContext) -> dict[str, Any]:
        """Returns the chat template's variables, including those for `think` if the template can switch reasoning."""
        made = effort(self.think, context) if isinstance(self.think, str) else thinking(self.think, context)
        return made | (self.chat_template_kwargs or {})

    @property
    def form(self) -> list[StructuredOutput]:
        """The structured output that `format` asks for; empty if the text is free."""
        if self.format in (None, ""):  # {} is a schema, of any JSON value
            return []
        kind: Kind = "json" if isinstance(self.format, dict) else "json_object"
        return [StructuredOutput("format", kind, self.format)]


# Ollama's chat messages, and the prompt made from them.
#
# A tool result need not name its call, so results without an id are assigned to the calls in order.

MAX_CALLS = 1024
MAX_IMAGES = 1024
Images = Annotated[
    Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None, doc("Images in base64, which stand before the text")
]


class CalledTool(RequestModel):
    IGNORED: ClassVar[Names] = ("index", "description")

    name: Text
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class ToolCall(RequestModel):
    function: CalledTool
    id: Text | None = None
    type: Literal["function"] | None = None


class Message(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images = None
    thinking: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


async def messages_prompt(
    messages: Sequence[Message], functions: Sequence[Function], arguments: dict[str, Any], context: ModelContext
) -> Prompt:
    """Renders the prompt of a conversation. If the last message is the assistant's, the answer continues it."""
    resume = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return await render_prompt(chat_messages(messages), context, arguments, functions, not resume, resume)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Returns the messages for chat templates: every call gets an id, and every result gets the id of its call."""
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    shown: list[ChatMessage] = []
    for place, one in enumerate(messages):
        calls = [
            call(each.id or f"call_{place}_{index}", each.function.name, each.function.arguments)
            for index, each in enumerate(one.tool_calls or ())
        ]
        open_calls += [(each["id"], each["function"]["name"]) for each in calls]
        also = _answered(one, open_calls) if one.role == "tool" else {}
        text, sources = with_images(one.images, one.content)
        shown.append(chat_message(one.role, text, one.thinking, calls) | also | within(sources, f"messages[{place}]"))
    return shown


def with_images(images: Sequence[str] | None, text: str) -> tuple[str, ChatMessage]:
    """Returns the text with a mark for each image at its beginning, and the message fields that hold the images."""
    parts = [Image(Source(image) if image.startswith("data:") else base64_source(image)) for image in images or ()]
    return "".join(part.source.mark for part in parts) + text, found_in(parts, "images")


class Image(NamedTuple):
    source: Source


def _answered(result: Message, open_calls: list[tuple[str, str]]) -> ChatMessage:
    """Returns the fields that assign a result to its call, and removes the call from the open ones."""
    said = result.tool_name or result.name
    fitting = [
        one for one in open_calls if result.tool_call_id in (None, "", one[0]) and said in (None, "", one[1])
    ] or open_calls[:1]
    if not fitting:
        return {"name": said} if said else {}
    open_calls.remove(fitting[0])
    id, name = fitting[0]
    return {"tool_call_id": result.tool_call_id or id, "name": said or name}


# The JSON types of Ollama's API. Durations are in nanoseconds, and only the last object of a stream has them.

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(ResponseModel):
    error: str


class OllamaFunction(ResponseModel):
    index: Size
    name: str
    arguments: dict[str, Any]


class OllamaCall(ResponseModel):
    id: str
    function: OllamaFunction


class OllamaMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(ResponseModel):
    """The fields that the responses of /api/chat and /api/generate share."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: Size | UnsetType = UNSET
    load_duration: Size | UnsetType = UNSET
    prompt_eval_count: Size | UnsetType = UNSET
    prompt_eval_duration: Size | UnsetType = UNSET
    eval_count: Size | UnsetType = UNSET
    eval_duration: Size | UnsetType = UNSET
    logprobs: list[TokenLogprobs] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class OllamaChat(OllamaAnswer):
    message: OllamaMessage


class OllamaText(OllamaAnswer):
    response: str
    thinking: str | UnsetType = UNSET
    context: Annotated[list[Size], Meta(description="The conversation so far, as token ids")] | UnsetType = UNSET


class OllamaEmbeddings(ResponseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: Size
    load_duration: Size = 0
    prompt_eval_count: Size


class OllamaEmbedding(ResponseModel):
    embedding: list[float]


class OllamaDetails(ResponseModel):
    """Facts about the files of weights, as far as they are on this machine; else they are empty."""

    parent_model: str = ""
    format: Annotated[str, Meta(description="gguf or safetensors")] = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: Annotated[str, Meta(description="How many parameters the model has, such as 7.6B")] = ""
    quantization_level: Annotated[str, Meta(description="The kind of numbers, such as Q4_K_M or BF16")] = ""


class OllamaModel(ResponseModel):
    name: str
    model: str
    modified_at: str
    size: Size = 0
    digest: Annotated[str, Meta(description="Of the tokenizer")]
    details: OllamaDetails


class OllamaModels(ResponseModel):
    models: list[OllamaModel]


class OllamaRunning(ResponseModel):
    name: str
    model: str
    size: Size = 0
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: Size = 0
    context_length: Size


class OllamaProcesses(ResponseModel):
    models: list[OllamaRunning]


class OllamaShown(ResponseModel):
    license: str = ""
    modelfile: str
    parameters: Annotated[str, Meta(description="What the checkpoint recommends, and the defaults of a name")]
    template: Annotated[str, Meta(description="The chat template, in Jinja")]
    system: Annotated[str | UnsetType, Meta(description="The system message of a name that has one")] = UNSET
    messages: Annotated[
        list[dict[str, str]] | UnsetType, Meta(description="What conversations of a name begin with")
    ] = UNSET
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class OllamaVersion(ResponseModel):
    version: str

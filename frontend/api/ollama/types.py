"""The fields that /api/chat and /api/generate share, and their translation to this server's fields."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.chat.structured_output_fields import Kind, StructuredOutput
from frontend.api.chat.thinking_fields import effort, thinking
from frontend.api.model_context import ModelContext
from frontend.api.prepare import Reading
from frontend.api.requests.request_model import MOST, RequestModel
from frontend.api.requests.request_types import (
    Factor,
    Ignored,
    Penalty,
    PositiveShare,
    SamplerFields,
    Share,
    StopText,
    StopTexts,
    Temperature,
    TemplateArguments,
    Text,
    check_stops,
    doc,
)
from frontend.api.requests.sampler_fields import Mirostat, MirostatEta, MirostatTau, RepeatLastN, TypicalP
from frontend.output_parser.tool_choice import ToolChoice

Unlimited = Annotated[int, Meta(ge=-2, le=MOST)]  # 0 and negative values: no limit
OllamaModelName = Annotated[Text, doc("The served name, see `/api/tags`; `:latest` may follow it")]


class Options(RequestModel):
    """Ollama's options of a model. Options for loading are accepted without effect, because the model is loaded."""

    ONLY: ClassVar = {
        "tfs_z": (1.0,),
        "penalize_newline": (True,),
    }

    temperature: Temperature | None = None
    top_k: Unlimited | None = None
    top_p: PositiveShare | None = None
    min_p: Share | None = None
    seed: int | None = None
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
    num_ctx: Ignored = None
    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    num_thread: Ignored = None
    main_gpu: Ignored = None
    numa: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    logits_all: Ignored = None
    vocab_only: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    embedding_only: Ignored = None

    def __post_init__(self) -> None:
        check_stops("stop", self.stop)

    @property
    def limit(self) -> int | None:
        """The limit on new tokens; None: no limit."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    def fields(self, **more: Any) -> SamplerFields:
        """Returns the options under OpenAI's names. more: fields for which Ollama has no option"""
        return SamplerFields(
            temperature=self.temperature, top_k=None if self.top_k is None else max(0, self.top_k), top_p=self.top_p,
            min_p=self.min_p, seed=self.seed, stop=self.stop or None, repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n, typical_p=self.typical_p, mirostat=self.mirostat,
            mirostat_tau=self.mirostat_tau, mirostat_eta=self.mirostat_eta, **more,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """The data of a request that its response repeats."""

    model: str  # the name that the client wrote
    before: list[int] | None = None  # ids of the prompt; None: not reported


class AnswerFields(RequestModel):
    """The fields of both /api/chat and /api/generate."""

    ONLY: ClassVar = {"logprobs": (False,), "top_logprobs": (0,)}

    model: OllamaModelName
    stream: Annotated[bool, doc("false: one object instead of lines")] = True
    options: Annotated[Options | None, doc("Sampling, `num_predict` (tokens of the answer) and `stop`")] = None
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None, doc("`json`, or a JSON schema that the answer keeps to")
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        doc("Whether to think, and how much if a model knows degrees"),
    ] = None
    chat_template_kwargs: TemplateArguments = None
    receipt: Annotated[bool, doc("Add `receipt`, with which `/v1/receipts/verify` checks the answer")] = False
    keep_alive: Annotated[Any, doc("How long the model stays loaded, where there are many")] = None

    @property
    def chosen(self) -> Options:
        return self.options or Options()

    def reading(self, param: str, tool_choice: ToolChoice | None, before: list[int] | None = None) -> Reading:
        """Returns the request in the form that all API formats share.

        param: the request field that holds the prompt
        before: the ids of the prompt, if the response reports them
        """
        return Reading(
            self.chosen.fields(stream=self.stream, receipt=self.receipt), param, self.chosen.limit,
            ends_with_context=True, tool_choice=tool_choice, form=self.form, format_data=Asked(self.model, before),
        )  # fmt: skip

    def template_arguments(self, context: ModelContext) -> dict[str, Any]:
        """Returns the chat template's variables, including those for `think` if the template can switch reasoning."""
        made = effort(self.think, context) if isinstance(self.think, str) else thinking(self.think, context)
        return made | (self.chat_template_kwargs or {})

    @property
    def form(self) -> list[StructuredOutput]:
        """The structured output that `format` asks for; empty if the text is free."""
        if not self.format:
            return []
        kind: Kind = "json" if isinstance(self.format, dict) else "json_object"
        return [StructuredOutput("format", kind, self.format)]

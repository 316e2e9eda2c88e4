"""The fields that API formats share, as types; each format's own request types build on them.

A field's type says what it accepts, its default and, in `Meta(description=...)`, what it means. The API description
and the tables of docs/api.md are made from these types.
"""

from typing import Annotated, Any, ClassVar, TypeAlias

from msgspec import Meta

from frontend.api.decoding import LARGEST, MOST, SMALLEST, FieldError, RequestModel

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ignored = Annotated[Any, Meta(description="Accepted, no effect")]
Refused: TypeAlias = None  # a field that is known and not offered: only null is accepted

ModelName = Annotated[Text | None, Meta(description="The served name, see `/v1/models`; absent: the served model")]
TemplateArguments = Annotated[
    dict[str, Any] | None, Meta(description="Variables that are passed to the model's chat template")
]
TopLogprobs = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
    Meta(description="How many of the most likely tokens come with each token; a chat needs `logprobs`, too"),
]
_LOW64, _HIGH64 = -(1 << 63), (1 << 64) - 1
_Seed = Annotated[int, Meta(extra_json_schema={"minimum": _LOW64, "maximum": _HIGH64})]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ResponseStreamOptions(StreamOptions):
    continuous_usage_stats: Refused = None  # type: ignore[assignment]


class GenerationFields(RequestModel):
    """The fields of every format that generates; null or absence of a sampling field means the model's default."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=LARGEST)] | None,
        Meta(description="0: the most likely token; higher values draw more randomly"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=SMALLEST, le=1)] | None,
        Meta(description="Draw from the most likely tokens that together have this probability"),
    ] = None
    top_k: Annotated[
        Positive | None, Meta(description="Draw from this many of the most likely tokens; null: from all")
    ] = None
    seed: Annotated[
        _Seed | None,
        Meta(description="The same seed gives the same bytes; absent: one is drawn and reported in the answer"),
    ] = None
    min_tokens: Annotated[
        Count | None, Meta(description="The model may not end its answer before this many tokens")
    ] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="Continue until `max_tokens` where the model would end its answer")
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[Count], Meta(max_length=1024)] | None, Meta(description="Token ids that end the answer")
    ] = None
    stream: Annotated[bool, Meta(description="Answer in server-sent events")] = False
    stream_options: Annotated[
        StreamOptions | None,
        Meta(
            description="`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk"
        ),
    ] = None
    timings: Annotated[
        bool,
        Meta(
            description="Add `timings`: queue, prefill and decode in ms, cached tokens, time between tokens (p50, p99)"
        ),
    ] = False
    cache_salt: Annotated[
        Text | None, Meta(description="The prefix cache is shared only with requests that have the same salt")
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MOST - 1, le=MOST)],
        Meta(description="Lower goes first, among requests of the same API key's name"),
    ] = 0
    deadline_ms: Annotated[
        Positive | None,
        Meta(description="Time limit of the whole request, from its arrival; then 504, or the stream's error event"),
    ] = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None

    def __post_init__(self) -> None:
        if self.seed is not None and not _LOW64 <= self.seed <= _HIGH64:  # beyond what Meta can bound
            raise FieldError("seed", f"must be a signed or unsigned integer of 64 bits, got {self.seed!r:.80}")


JsonSchemaValue = dict[str, Any] | bool | str
_Choices = Annotated[list[str], Meta(max_length=4096)]
_BIAS = Annotated[float, Meta(ge=-100, le=100)]
_TOKEN_ID = Annotated[int, Meta(ge=0, le=9_999_999_999)]  # the vocabulary is checked where it is known


class StructuredOutputs(RequestModel):
    """vLLM's newer names of the `guided_` fields."""

    json: JsonSchemaValue | None = None
    json_object: bool = False
    regex: Text | None = None
    choice: _Choices | None = None
    grammar: Text | None = None


class OpenAIFields(GenerationFields):
    """The fields of OpenAI's formats, with those of vLLM and SGLang."""

    # Features of other servers that are not offered, with the values that ask for what happens here in any case.
    ONLY: ClassVar = {
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "include_reasoning": (True,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "bad_words": ([],),
        "logits_processors": ([],),
    }

    min_p: Annotated[
        Share | None, Meta(description="Draw from tokens that are at least this share as likely as the most likely one")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=1e-6, le=1e6)] | None,
        Meta(description="Above 1: makes tokens of the prompt and the answer less likely, by division"),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        Meta(description="Subtracted from the logit of every token that the answer has"),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        Meta(description="Subtracted from a token's logit for every time that the answer has it"),
    ] = None
    logit_bias: Annotated[
        dict[_TOKEN_ID, _BIAS] | None, Meta(description="Token ids and what is added to their logits")
    ] = None
    stop: Annotated[
        Text | Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None,
        Meta(description="Texts that end the answer; they are not part of it"),
    ] = None
    guided_json: Annotated[
        JsonSchemaValue | None, Meta(description="A JSON schema (or the text of one) that the answer keeps to")
    ] = None
    guided_regex: Annotated[Text | None, Meta(description="A regular expression that the whole answer matches")] = None
    guided_choice: Annotated[_Choices | None, Meta(description="The answer is one of these texts")] = None
    guided_grammar: Annotated[Text | None, Meta(description="A grammar (Lark or GBNF) that the answer keeps to")] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="The same by vLLM's newer names")] = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    allowed_token_ids: Refused = None
    prompt_logprobs: Refused = None
    truncate_prompt_tokens: Refused = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

"""The JSON of SGLang's routes: the body of /generate (prompts, `sampling_params`, the details of an answer), and
responses.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import UNSET, Meta, UnsetType

from frontend.api.openai.completions import MAX_PROMPTS, MOST_TOKENS, Prompt
from frontend.errors import BadRequest
from frontend.schema.base import EXACT, MOST, FieldError, Names, RequestModel, ResponseModel
from frontend.schema.request_fields import (
    MIN_TOKENS,
    STOPS,
    ChoiceCount,
    Count,
    Factor,
    JsonSchemaValue,
    LogitBias,
    LogprobCount,
    ModelName,
    Penalty,
    Positive,
    PositiveShare,
    SaltField,
    Share,
    StopText,
    StopTexts,
    StructuredOutputs,
    Temperature,
    Text,
    TokenDetailFields,
    TokenIds,
    TopK,
    check_stops,
    doc,
)
from frontend.schema.responses import Size

SAME = (  # the sampling parameters that have the same names on OpenAI's routes
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias", "json_schema", "regex", "ebnf",
)  # fmt: skip
T = TypeVar("T")
_Token = Annotated[int, EXACT]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Start = Annotated[int, Meta(ge=-1, le=MOST)]
_FOR_EACH = Meta(min_length=1, max_length=MAX_PROMPTS)
_ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_several: dict[str, Any] = {"type": "array", "items": _ids, "minItems": 1, "maxItems": MAX_PROMPTS}


class SamplingParams(RequestModel):
    ONLY: ClassVar = {"stop_regex": ([],)}
    IGNORED: ClassVar[Names] = ("custom_params", "stream_interval")
    REFUSED: ClassVar[Names] = ("thinking_budget",)

    max_new_tokens: Annotated[
        Count | None, doc(f"Most tokens of the answer; 0: the prompt is only computed; absent: {MOST_TOKENS}")
    ] = None
    min_new_tokens: Annotated[Count | None, doc(MIN_TOKENS)] = None
    n: Annotated[ChoiceCount, doc("Answers to each prompt; their seeds follow each other")] = 1
    temperature: Annotated[Temperature | None, doc("0: the likeliest token; higher values draw more randomly")] = None
    top_p: Annotated[
        PositiveShare | None, doc("Draw from the likeliest tokens that together have this probability")
    ] = None
    top_k: Annotated[TopK | None, doc("Draw from this many of the likeliest tokens; 0 and -1: from all")] = None
    min_p: Annotated[Share | None, doc("Draw from tokens at least this share as likely as the likeliest")] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each time it is in the answer")
    ] = None
    presence_penalty: Annotated[Penalty | None, doc("Subtracted from the logits of all tokens in the answer")] = None
    repetition_penalty: Annotated[Factor | None, doc("Above 1: makes tokens of prompt and answer less likely")] = None
    sampling_seed: Annotated[_Seed | None, doc("The same seed gives the same bytes; absent: a random one")] = None
    stop: Annotated[StopText | StopTexts | None, doc(STOPS)] = None
    stop_token_ids: Annotated[TokenIds | None, doc("Token ids that end the answer")] = None
    ignore_eos: Annotated[bool | None, doc("Continue until `max_new_tokens`, even if the model would end")] = None
    skip_special_tokens: Annotated[bool, doc("false: the text shows special tokens, but not those that end it")] = True
    spaces_between_special_tokens: Annotated[bool, doc("No effect: there are no such spaces")] = True
    no_stop_trim: Annotated[bool, doc("The answer ends with the stop text that ended it")] = False
    logit_bias: Annotated[LogitBias | None, doc("Token ids and what is added to their logits")] = None
    json_schema: Annotated[JsonSchemaValue | None, doc("A JSON schema (or its text) that the answer keeps to")] = None
    regex: Annotated[Text | None, doc("A regular expression that the whole answer matches")] = None
    ebnf: Annotated[Text | None, doc("A grammar (Lark or GBNF) that the answer keeps to")] = None
    structural_tag: Annotated[
        dict[str, Any] | Text | None, doc("Free text in which tagged parts keep to schemas (or its JSON as a text)")
    ] = None

    def __post_init__(self) -> None:
        check_stops("stop", self.stop)


class GenerateRequest(RequestModel):
    ONLY: ClassVar = {
        **dict.fromkeys(
            (
                "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_entropy",
                "return_sampling_mask", "return_flat_raw_top_logprobs", "return_prompt_token_ids", "background",
                "require_reasoning",
            ),
            (False,),
        ),
        "routed_experts_start_len": (0,),
    }  # fmt: skip
    IGNORED: ClassVar[Names] = (
        "log_metrics", "no_logs", "session_id", "conversation_id", "routing_key", "custom_labels",
        "return_bytes", "received_time", "external_trace_header",
    )  # fmt: skip
    REFUSED: ClassVar[Names] = (
        "input_embeds", "image_data", "audio_data", "video_data", "token_ids_logprob", "session_params",
        "lora_path", "lora_id", "positional_embed_overrides", "custom_logit_processor",
        "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "extra_key", "images_config",
        "max_thinking_tokens",
    )  # fmt: skip

    text: Annotated[
        Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_PROMPTS)] | None, doc("A text, or several")
    ] = None
    input_ids: Annotated[
        Annotated[list[_Token | list[_Token]], Meta(extra_json_schema={"anyOf": [_ids, _several]})] | None,
        doc("Token ids of one prompt or several, in place of `text`"),
    ] = None
    sampling_params: Annotated[
        SamplingParams | Annotated[list[SamplingParams], Meta(min_length=1, max_length=MAX_PROMPTS)] | None,
        doc("How tokens are drawn; an array must have equal entries, one for each prompt"),
    ] = None
    stream: Annotated[bool, doc("Answer in server-sent events, each of which has all of the answer so far")] = False
    return_logprob: Annotated[
        bool | Annotated[list[bool], _FOR_EACH],
        doc("Report the log-probabilities of the answer's tokens"),
    ] = False
    logprob_start_len: Annotated[
        _Start | Annotated[list[_Start], _FOR_EACH] | None,
        doc("Also tell log-probabilities of the prompt's tokens from this one on; -1: none; not in streams"),
    ] = None
    top_logprobs_num: Annotated[
        LogprobCount | Annotated[list[LogprobCount], _FOR_EACH] | None,
        doc("Report log-probabilities of this many likeliest tokens in each place, up to `--max-logprobs`"),
    ] = None
    return_text_in_logprobs: Annotated[bool, doc("Log-probabilities have the tokens' texts")] = False
    rid: Annotated[str | list[str] | None, doc("The `id` of the answers")] = None
    model: ModelName = None
    cache_salt: SaltField = None
    priority: Annotated[
        int, Meta(ge=-MOST - 1, le=MOST), doc("Lower values run first, among requests of one API key's name")
    ] = 0
    deadline_ms: Annotated[Positive | None, doc("Time limit from the request's arrival; then 504")] = None

    def __post_init__(self) -> None:
        if self.text is None and self.input_ids is None:
            raise FieldError("text", "is missing, and so is `input_ids`", BadRequest, "missing_field")
        if self.text is not None and self.input_ids is not None:
            raise FieldError("input_ids", "cannot go with `text`", code="conflicting_fields")
        if self.input_ids is not None:
            self._check_ids(self.input_ids)
        for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"):
            self._check_equal(name, getattr(self, name))

    def _check_equal(self, name: str, given: Any) -> None:
        """Raises FieldError for an array of a field that all prompts of a request have in common."""
        if not isinstance(given, list):
            return
        if len(given) != len(self.prompts):
            raise FieldError(name, f"must have {len(self.prompts)} entries, one for each prompt")
        if any(one != given[0] for one in given):
            raise FieldError(name, "must be equal for all prompts of a request")

    def _check_ids(self, ids: list[Any]) -> None:
        if not ids or [] in ids:
            raise FieldError("input_ids", "is empty", BadRequest, "empty_prompt")
        if len({*map(type, ids)}) > 1:
            raise FieldError("input_ids", "must be an array of token ids or of arrays", BadRequest, "wrong_type")
        if type(ids[0]) is list and len(ids) > MAX_PROMPTS:
            raise FieldError("input_ids", f"may have at most {MAX_PROMPTS} entries")

    @property
    def param(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def several(self) -> bool:
        """Whether the prompts are an array."""
        return isinstance(self.text, list) or (self.input_ids is not None and type(self.input_ids[0]) is list)

    @property
    def prompts(self) -> list[Prompt]:
        given: Any = self.input_ids if self.text is None else self.text
        return given if self.several else [given]

    @property
    def params(self) -> SamplingParams:
        return _first(self.sampling_params) or SamplingParams()

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of the answer's tokens are reported."""
        return _first(self.return_logprob) or False

    @property
    def scored_from(self) -> int | None:
        """The first token of the prompt that is scored, if any is."""
        start = _first(self.logprob_start_len)
        return start if self.scored and start != -1 else None

    @property
    def top(self) -> int:
        """How many of the likeliest tokens are reported in each place."""
        return max(0, _first(self.top_logprobs_num) or 0)

    @property
    def fields(self) -> TokenDetailFields:
        """The fields of the request under OpenAI's names."""
        params = self.params
        tag = params.structural_tag
        return TokenDetailFields(
            **{name: getattr(params, name) for name in SAME}, seed=params.sampling_seed,
            min_tokens=params.min_new_tokens, stream=self.stream, cache_salt=self.cache_salt, priority=self.priority,
            deadline_ms=self.deadline_ms, prompt_logprobs=None if self.scored_from is None else self.top,
            structured_outputs=None if tag is None else StructuredOutputs(structural_tag=tag),
        )  # fmt: skip


def _first(given: T | list[T] | None) -> T | None:
    """Returns what holds for all prompts: a value or the first of equal ones, if any is given."""
    return given[0] if isinstance(given, list) else given


# The types of the responses of SGLang's routes.

Scored = Annotated[tuple[float | None, Size, str | None], Meta(description="Log-probability, id, text")]


class SglangFinish(ResponseModel):
    type: Literal["stop", "length"]
    matched: Annotated[str | int | UnsetType, Meta(description="The stop text or token id that ended it")] = UNSET
    length: Size | UnsetType = UNSET


class SglangMeta(ResponseModel):
    id: str
    finish_reason: Annotated[SglangFinish | None, Meta(description="null until the answer has ended")]
    prompt_tokens: Size
    completion_tokens: Size
    cached_tokens: Size
    weight_version: Annotated[str, Meta(description="The fingerprint of what decides the answer's bits")]
    seed: Annotated[Size | UnsetType, Meta(description="With it, the same request has the same answer")] = UNSET
    e2e_latency: Annotated[float | UnsetType, Meta(description="Seconds in the worker")] = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored]] | UnsetType = UNSET


class SglangAnswer(ResponseModel):
    text: str
    output_ids: list[Size]
    meta_info: SglangMeta
    index: Annotated[Size | UnsetType, Meta(description="Of the answer, in streams with several")] = UNSET


class SglangModelInfo(ResponseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float] | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: Literal[False] = False


class SglangState(ResponseModel):
    last_gen_throughput: Annotated[float, Meta(description="Tokens per second, over the last 10 s")]


class SglangServerInfo(ResponseModel):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: Annotated[Size | None, Meta(description="null until a worker has reported it")]
    max_running_requests: Annotated[Size, Meta(description="Sequences that can run at once")]
    is_embedding: bool
    version: str
    internal_states: Annotated[list[SglangState], Meta(description="One for each worker")]

"""The request fields that API formats share, as types. Each format's own request types build on them.

A field's type says which values it accepts, its default and, in `doc(...)`, its meaning. The API description and the
tables of docs/api.md are made from these types.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from frontend.request import Telemetry
from frontend.schema.base import LARGEST, MOST, SMALLEST, FieldError, Names, RequestModel

# The fields of the samplers that only llama.cpp has: their types, and the sampler names in `samplers`.

LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
OTHER_NAMES = {"typical_p": "typ_p", "temp": "temperature"}
NO_EFFECT = "infill"  # an ignored sampler, which only helps models without fill-in-the-middle tokens
DEFAULT_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
MAX_SAMPLERS = 16  # each costs some milliseconds a token with a large vocabulary
MAX_BREAKERS, MAX_BREAKER_CHARS, MAX_ALL_BREAKERS = 16, 40, 128
_Amount = Annotated[float, Meta(ge=0, le=1e6)]
_Length = Annotated[int, Meta(ge=0, le=MOST)]
_Window = Annotated[int, Meta(ge=-1, le=MOST)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_CHARS)]
# `check_samplers` checks the values, because msgspec 0.22 crashes at exit where two types of a union share a pattern.
_Sampler = Annotated[str, Meta(extra_json_schema={"enum": [*LETTERS.values(), *OTHER_NAMES]})]
_Letters = Annotated[str, Meta(extra_json_schema={"pattern": "^[edskypmxti]*$"})]


def _doc(text: str) -> Meta:
    return Meta(description=text)


DryMultiplier = Annotated[_Amount | None, _doc("Above 0: DRY subtracts this from tokens that extend a repetition")]
DryBase = Annotated[
    Annotated[float, Meta(ge=1, le=1e6)] | None, _doc("DRY's factor for each token beyond the allowed length [1.75]")
]
DryAllowedLength = Annotated[_Length | None, _doc("Repetitions of fewer tokens cost nothing [2]")]
DryPenaltyLastN = Annotated[_Window | None, _doc("Look for repetitions in this many last tokens; -1: in all [-1]")]
DrySequenceBreakers = Annotated[
    Annotated[list[_Breaker], Meta(min_length=1, max_length=MAX_BREAKERS)] | None,
    _doc('Texts that end a repetition [`"\\n"`, `":"`, `"\\""`, `"*"`]'),
]
XtcProbability = Annotated[_Share | None, _doc("How often XTC drops all likely tokens but the least likely one")]
XtcThreshold = Annotated[_Share | None, _doc("From which probability on XTC calls a token likely [0.1]")]
TypicalP = Annotated[
    Annotated[float, Meta(ge=SMALLEST, le=LARGEST)] | None,
    _doc("Below 1: draw from tokens with information nearest to the entropy, with this probability together"),
]
TopNSigma = Annotated[
    Annotated[float, Meta(ge=-LARGEST, le=LARGEST)] | None,
    _doc("Above 0: draw from tokens within this many standard deviations of the highest logit"),
]
DynatempRange = Annotated[_Amount | None, _doc("The temperature follows the entropy, within this of `temperature`")]
DynatempExponent = Annotated[_Amount | None, _doc("With `dynatemp_range`: the exponent of the entropy's share [1]")]
RepeatLastN = Annotated[
    _Window | None,
    _doc("All penalties look at this many last tokens of prompt and answer; 0: no penalties, -1: at all"),
]
Mirostat = Annotated[
    Annotated[int, Meta(ge=0, le=2)] | None,
    _doc("1 or 2: keep the surprise of tokens near a target; all samplers except the temperature are then off"),
]
MirostatTau = Annotated[_Amount | None, _doc("Mirostat's target in bits [5]")]
MirostatEta = Annotated[_Amount | None, _doc("How fast Mirostat learns [0.1]")]
MinKeep = Annotated[_Length | None, _doc("`top_p`, `min_p`, `typical_p` and XTC leave at least this many tokens")]
SamplerOrder = Annotated[
    list[_Sampler] | _Letters | None,
    _doc("The samplers in their order, as names or letters of `edskypmxti`; the others are off"),
]


def check_breakers(texts: Sequence[str] | None) -> None:
    """Raises FieldError for breakers that are too long together, as each character costs a search in the vocabulary."""
    if sum(map(len, texts or ())) > MAX_ALL_BREAKERS:
        raise FieldError("dry_sequence_breakers", f"may have at most {MAX_ALL_BREAKERS} characters in all")


def order_of(samplers: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of the samplers, in order. samplers: names, or a string of letters; None: llama.cpp's order"""
    if samplers is None:
        return DEFAULT_ORDER
    named = [LETTERS[one] for one in samplers] if isinstance(samplers, str) else samplers
    return tuple(name for one in named if (name := OTHER_NAMES.get(one, one)) != NO_EFFECT)


def check_samplers(samplers: Sequence[str] | None) -> None:
    """Raises FieldError for the name of an unknown sampler, and for too many entries."""
    known = LETTERS.keys() if isinstance(samplers, str) else {*LETTERS.values(), *OTHER_NAMES}
    if unknown := [one for one in samplers or () if one not in known]:
        raise FieldError("samplers", f"has no {unknown[0]!r:.80}; there are {', '.join(LETTERS.values())}")
    if len(samplers or ()) > MAX_SAMPLERS:
        raise FieldError("samplers", f"may have at most {MAX_SAMPLERS} entries")


MAX_STOP_BYTES = 16_384  # of UTF-8, for all stop strings together: their automaton takes 0.3 KB and 2 µs a character
MAX_STOP_IDS = 1024  # the worker takes no more
MAX_SALT_CHARS = 256
MAX_CHOICES = 128
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits: entries, and characters


def doc(description: str) -> Meta:
    return Meta(description=description)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises FieldError for a key that is too long."""
    if any(len(name) > MAX_METADATA_KEY for name in metadata or ()):
        raise FieldError("metadata", f"may have keys of at most {MAX_METADATA_KEY} characters")


Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
UNLIMITED = -1  # a limit on new tokens: up to the context's end, even if the model's name has a limit of its own
TokenLimit = Annotated[int, Meta(ge=-2, le=MOST, extra_json_schema={"not": {"const": 0}})]  # see `limit_of`
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(ge=SMALLEST, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=LARGEST)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
TopK = Annotated[int, Meta(ge=-1, le=MOST)]
LogprobCount = Annotated[int, Meta(ge=-1, le=MOST)]  # likeliest tokens to report besides the sampled one; -1: all
TokenIds = Annotated[list[Count], Meta(max_length=MAX_STOP_IDS)]
MOST_IDS = 1 << 24
TextIds = Annotated[list[Count], Meta(max_length=MOST_IDS)]  # the ids of a whole prompt or answer
STOPS = f"Texts that end the answer, of {MAX_STOP_BYTES} bytes in all; they are not part of it"
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = list[StopText]
MIN_TOKENS = "Neither the model nor a stop id ends the answer before this many tokens; a stop text does"
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
SaltField = Annotated[Salt | None, doc("The prefix cache is shared only with requests of the same salt")]
KeptMetadata = Annotated[dict[str, Annotated[str, Meta(max_length=MAX_METADATA_VALUE)]], Meta(max_length=MAX_METADATA)]
ModelName = Annotated[str | None, doc("A served name, see `/v1/models`; absent or empty: the served model")]
TemplateArguments = Annotated[dict[str, Any] | None, doc("Variables that are passed to the model's chat template")]
IncludeReasoning = Annotated[bool, doc("false: leave the reasoning out of the answer; usage still counts it")]
SeparateReasoning = Annotated[bool, doc("false: reasoning stays in the text, as the model wrote it")]
StreamReasoning = Annotated[bool, doc("false: a stream has reasoning in one piece, at its end")]
TopLogprobs = Annotated[
    LogprobCount | None,
    doc("How many likeliest tokens to report per token, up to `--max-logprobs`; -1: all; chats also need `logprobs`"),
]
ChoiceCount = Annotated[
    int, Meta(ge=1, le=MAX_CHOICES), doc("Answers to each prompt; their seeds are `seed`, `seed` + 1, …")
]
Indent = Annotated[Count, doc("End before a line, after the first, that begins with fewer blanks; 0: never")]
TimingsPerToken = Annotated[bool, doc("Every event of a stream has llama.cpp's `timings`")]
ReturnProgress = Annotated[bool, doc("A stream begins with `prompt_progress` once the prompt is computed")]
_LOW64, _HIGH64 = -(1 << 63), (1 << 64) - 1
Seed = Annotated[int, Meta(extra_json_schema={"minimum": _LOW64, "maximum": _HIGH64})]  # see `check_seed`


def check_stops(field: str, stops: str | Sequence[str] | None) -> None:
    """Raises FieldError if the stop strings of a request are too long together. field: the field that holds them"""
    if stops:
        texts = (stops,) if isinstance(stops, str) else stops
        if sum([len(text.encode(errors="replace")) for text in texts]) > MAX_STOP_BYTES:
            raise FieldError(field, f"may have at most {MAX_STOP_BYTES} bytes in all")


def check_seed(seed: int | None) -> None:
    """Raises FieldError for a seed of more than 64 bits. msgspec's Meta takes only bounds within int64."""
    if seed is not None and not _LOW64 <= seed <= _HIGH64:
        raise FieldError("seed", f"must be a signed or unsigned integer of 64 bits, got {seed!r:.80}")


def check_indent(indent: int, receipt: bool) -> None:
    """Raises FieldError if a request with a receipt has `n_indent`, because a receipt does not tell this limit."""
    if indent and receipt:
        raise FieldError("receipt", "cannot go with `n_indent`", code="conflicting_fields")


def limit_of(field: str, given: int | None) -> int | None:
    """Returns a limit on new tokens; UNLIMITED for -1 and -2, as for llama.cpp's and LM Studio's clients.

    field: the field that holds the limit. Raises FieldError for 0.
    """
    if given == 0:
        raise FieldError(field, "must be -2, -1 or at least 1, got 0")
    return given if given is None else max(UNLIMITED, given)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ResponseStreamOptions(StreamOptions):
    REFUSED: ClassVar[Names] = ("continuous_usage_stats",)


class GenerationFields(RequestModel):
    """The fields of every format that generates text. An absent sampling field has the model's default."""

    IGNORED: ClassVar[Names] = ("user", "metadata", "store", "service_tier")

    temperature: Annotated[Temperature | None, doc("0: the likeliest token; higher values draw more randomly")] = None
    top_p: Annotated[
        Share | None, doc("Draw from the likeliest tokens that together have this probability; 0: the likeliest one")
    ] = None
    top_k: Annotated[TopK | None, doc("Draw from this many of the likeliest tokens; null, 0 and -1: from all")] = None
    seed: Annotated[
        Seed | None, doc("The same seed gives the same bytes; absent: a random one, reported in the answer")
    ] = None
    min_tokens: Annotated[Count | None, doc(MIN_TOKENS)] = None
    ignore_eos: Annotated[bool | None, doc("Continue until `max_tokens`, even if the model would end")] = None
    stop_token_ids: Annotated[TokenIds | None, doc("Token ids that end the answer")] = None
    stream: Annotated[bool, doc("Answer in server-sent events")] = False
    stream_options: Annotated[
        StreamOptions | None,
        doc(
            "`include_usage`: a last chunk with the usage, false: none anywhere; `continuous_usage_stats`: usage in "
            "every chunk"
        ),
    ] = None
    timings: Annotated[
        bool,
        doc("Add `timings`: queue, prefill and decode in ms, cached tokens, drafts, time between tokens (p50, p99)"),
    ] = False
    cache_salt: SaltField = None
    priority: Annotated[
        int, Meta(ge=-MOST - 1, le=MOST), doc("Lower values run first, among requests of one API key's name")
    ] = 0
    deadline_ms: Annotated[
        Positive | None, doc("Time limit from the request's arrival; then 504, or the stream's error event")
    ] = None
    receipt: Annotated[bool, doc("Add `receipt`, with which `/v1/receipts/verify` checks the answer")] = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        return ()

    @property
    def wants_chain(self) -> bool:
        """Whether a field asks for samplers beyond those of every request (frontend/chat/samplers.py)."""
        return False

    def __post_init__(self) -> None:
        check_seed(self.seed)


JsonSchemaValue = dict[str, Any] | bool | str
_Choices = Annotated[list[str], Meta(max_length=4096)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_AllowedIds = Annotated[list[Count], Meta(max_length=1 << 20)]
_BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(max_length=256)]
_Kept = Annotated[int, Meta(ge=-1, le=MOST)]
_TokenId = Annotated[int, Meta(ge=0, le=9_999_999_999)]  # request_builder.py compares the id with the vocabulary's size
LogitBias = dict[_TokenId, _Bias]


class StructuredOutputs(RequestModel):
    """vLLM's newer form of the `guided_` fields, as one object."""

    ONLY: ClassVar = {"disable_additional_properties": (False,)}
    REFUSED: ClassVar[Names] = ("whitespace_pattern",)

    json: JsonSchemaValue | None = None
    json_object: bool = False
    regex: Text | None = None
    choice: _Choices | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None
    disable_any_whitespace: Annotated[bool, doc("true: JSON has no white space between its parts")] = False


class PromptCacheOptions(RequestModel):
    ONLY: ClassVar = {"prewarm": (False,)}
    IGNORED: ClassVar[Names] = ("mode", "ttl", "comparison_response_id")


class OpenAIFields(GenerationFields):
    """The fields of OpenAI's formats, and those that vLLM and SGLang add to them."""

    # Fields of other servers' features that are not supported, with the values that leave a feature off.
    ONLY: ClassVar = {
        **dict.fromkeys(
            (
                "use_beam_search", "early_stopping", "watermarking", "return_hidden_states", "return_token_offsets",
                "return_prompt_text", "return_routed_experts", "return_cached_tokens_details",
                "return_weight_versions",
            ),
            (False,),
        ),
        **dict.fromkeys(("routed_experts_prompt_start", "routed_experts_start_len"), (0,)),
        "logits_processors": ([],),
        "length_penalty": (1.0,),
        "detokenize": (True,),
    }  # fmt: skip
    IGNORED: ClassVar[Names] = (
        "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "rid", "vllm_xargs", "custom_params",
        "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs", "mm_payload", "session_id", "stream_interval",
        "custom_labels", "guided_decoding_backend",
    )  # fmt: skip
    REFUSED: ClassVar[Names] = (
        "kv_transfer_params", "ec_transfer_params", "extra_key", "images_config", "ngram_corpus_id",
        "routed_dp_rank", "disagg_prefill_dp_rank", "prompt_embeds", "stop_regex", "lora_path",
        "session_params", "custom_logit_processor", "data_parallel_rank", "bootstrap_host", "bootstrap_port",
        "bootstrap_room", "logprob_token_ids", "repetition_detection", "guided_whitespace_pattern",
    )  # fmt: skip

    min_p: Annotated[Share | None, doc("Draw from tokens at least this share as likely as the likeliest")] = None
    repetition_penalty: Annotated[Factor | None, doc("Above 1: makes tokens of prompt and answer less likely")] = None
    presence_penalty: Annotated[Penalty | None, doc("Subtracted from the logits of all tokens in the answer")] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each time it is in the answer")
    ] = None
    logit_bias: Annotated[LogitBias | None, doc("Token ids and what is added to their logits")] = None
    stop: Annotated[StopText | StopTexts | None, doc(STOPS)] = None
    guided_json: Annotated[JsonSchemaValue | None, doc("A JSON schema (or its text) that the answer keeps to")] = None
    guided_regex: Annotated[Text | None, doc("A regular expression that the whole answer matches")] = None
    guided_choice: Annotated[_Choices | None, doc("The answer is one of these texts")] = None
    guided_grammar: Annotated[Text | None, doc("A grammar (Lark or GBNF) that the answer keeps to")] = None
    structured_outputs: Annotated[StructuredOutputs | None, doc("`guided_…` under vLLM's newer names")] = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None, doc("Accepted, no effect: all prompts are cached, as long as there is room")
    ] = None
    allowed_token_ids: Annotated[_AllowedIds | None, doc("The answer may have only these tokens")] = None
    bad_words: Annotated[
        _BadWords | None, doc("Texts that must not be in the answer, at the start of a word or within it")
    ] = None
    include_stop_str_in_output: Annotated[bool, doc("The answer ends with the stop text that ended it")] = False
    no_stop_trim: Annotated[bool, doc("SGLang's name of `include_stop_str_in_output`")] = False
    skip_special_tokens: Annotated[bool, doc("false: the text shows special tokens, but not those that end it")] = True
    spaces_between_special_tokens: Annotated[bool, doc("No effect: there are no such spaces")] = True
    truncate_prompt_tokens: Annotated[
        _Kept | None,
        doc("Keep only this many of the prompt's last tokens; -1: as many as leave room for the answer"),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, doc("`right`: `truncate_prompt_tokens` keeps the first tokens")
    ] = None
    timings_per_token: TimingsPerToken = False
    return_progress: ReturnProgress = False
    request_id: Annotated[Any, doc("Accepted, no effect: the header `X-Request-Id` names a request")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stops("stop", self.stop)

    @property
    def telemetry(self) -> Telemetry | None:
        if not (self.timings_per_token or self.return_progress):
            return None
        return Telemetry(self.timings_per_token, self.return_progress) if self.stream else None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class SamplerFields(OpenAIFields):
    """The fields that llama.cpp's clients send to OpenAI's routes. Most are for samplers, and few requests set one."""

    # Fields that only llama.cpp's own routes support, or that have another name here, with the values that set nothing.
    ONLY: ClassVar = {
        **OpenAIFields.ONLY,
        **dict.fromkeys(("return_tokens", "post_sampling_probs", "grammar_lazy"), (False,)),
        **dict.fromkeys(("response_fields", "lora", "grammar_triggers"), ([],)),
        "n_probs": (0,),
        "n_cmpl": (1,),
        "t_max_predict_ms": (0, -1),
        "adaptive_target": (-1.0,),
    }
    IGNORED: ClassVar[Names] = (
        "id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "sse_ping_interval",
        "preserved_tokens", "adaptive_decay",
    )  # fmt: skip

    n_predict: Annotated[
        TokenLimit | None,
        doc("Llama.cpp's name of `max_tokens`, which it overrides; -1 and -2: to the context's end"),
    ] = None
    n_indent: Indent = 0
    cache_prompt: Annotated[bool, doc("No effect: a prompt that is cached gives the same bytes")] = True
    samplers: SamplerOrder = None
    repeat_penalty: Annotated[Factor | None, doc("Llama.cpp's name of `repetition_penalty`")] = None
    dry_multiplier: DryMultiplier = None
    dry_base: DryBase = None
    dry_allowed_length: DryAllowedLength = None
    dry_penalty_last_n: DryPenaltyLastN = None
    dry_sequence_breakers: DrySequenceBreakers = None
    xtc_probability: XtcProbability = None
    xtc_threshold: XtcThreshold = None
    typical_p: TypicalP = None
    top_n_sigma: TopNSigma = None
    dynatemp_range: DynatempRange = None
    dynatemp_exponent: DynatempExponent = None
    repeat_last_n: RepeatLastN = None
    min_keep: MinKeep = None
    mirostat: Mirostat = None
    mirostat_tau: MirostatTau = None
    mirostat_eta: MirostatEta = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_predict is not None:  # the subclasses declare `max_tokens`
            force_setattr(self, "max_tokens", limit_of("n_predict", self.n_predict))
        check_indent(self.n_indent, self.receipt)
        check_samplers(self.samplers)
        check_breakers(self.dry_sequence_breakers)

    @property
    def wants_chain(self) -> bool:
        return bool(
            self.samplers is not None or self.dry_multiplier or self.xtc_probability or self.typical_p
            or self.top_n_sigma or self.dynatemp_range or self.repeat_last_n is not None or self.mirostat
        )  # fmt: skip


class TokenDetailFields(SamplerFields):
    """The fields of completions and chats that ask for token ids and log-probabilities in addition to text."""

    return_token_ids: Annotated[bool, doc("Add `token_ids`, and the prompt's as `prompt_token_ids`")] = False
    return_tokens_as_token_ids: Annotated[bool, doc("Log-probabilities name tokens as `token_id:ID`")] = False
    prompt_logprobs: Annotated[
        LogprobCount | None,
        doc("Log-probabilities of the prompt's tokens, and of this many likeliest tokens per token; not in streams"),
    ] = None
    grammar: Annotated[Text | None, doc("Llama.cpp's name of `guided_grammar`")] = None
    json_schema: Annotated[JsonSchemaValue | None, doc("Llama.cpp's name of `guided_json`")] = None
    regex: Annotated[Text | None, doc("SGLang's name of `guided_regex`")] = None
    ebnf: Annotated[Text | None, doc("SGLang's name of `guided_grammar`")] = None

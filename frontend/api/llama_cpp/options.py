"""The fields that llama.cpp's /completion and /infill share, and their translation to this server's fields."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from frontend.api.llama_cpp.types import needed, reporting
from frontend.api.openai.completions import MAX_PROMPTS
from frontend.api.request_builder import ParsedRequest, TokenLimits, allowed, check_total, prepare
from frontend.errors import BadRequest
from frontend.model_context import ModelContext, check_characters, check_ids
from frontend.request import Features, GenerationRequest, Telemetry
from frontend.schema.base import EXACT, LARGEST, MOST, FieldError, Names, RequestModel
from frontend.schema.request_fields import (
    MAX_CHOICES,
    STOPS,
    UNLIMITED,
    Count,
    DryAllowedLength,
    DryBase,
    DryMultiplier,
    DryPenaltyLastN,
    DrySequenceBreakers,
    DynatempExponent,
    DynatempRange,
    Factor,
    Indent,
    JsonSchemaValue,
    MinKeep,
    Mirostat,
    MirostatEta,
    MirostatTau,
    ModelName,
    Penalty,
    Positive,
    RepeatLastN,
    ReturnProgress,
    SamplerOrder,
    Share,
    TimingsPerToken,
    TokenDetailFields,
    TopNSigma,
    TypicalP,
    XtcProbability,
    XtcThreshold,
    check_breakers,
    check_indent,
    check_samplers,
    check_stops,
    doc,
)
from frontend.structured_output import fields as structured_output_fields
from frontend.text.fill_in_middle import ends_of
from shared.messages import Sampling

# Logit biases in llama.cpp's forms: by token id or by text, in pairs or in an object. `false` forbids a token.
#
# A bias may be any number. Beyond `MOST_BIAS`, every bias has the same effect: it decides alone.

LOGIT_BIAS = "logit_bias"
MAX_BIASES = 4096
MOST_BIAS = 1e30  # the worker adds biases in float32, and penalties multiply the sum by up to 1e6

_bias: dict[str, Any] = {"anyOf": [{"type": "number"}, {"enum": [False]}]}
_biased: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}
LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_BIASES,
            "items": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "prefixItems": [_biased, _bias],
                "items": {"anyOf": [*_biased["anyOf"], *_bias["anyOf"]]},
            },
        },
        {"type": "object", "maxProperties": MAX_BIASES, "additionalProperties": _bias},
    ]
}
Pair = list[str | float | bool]
LogitBias = Annotated[
    list[Pair] | dict[str, float | bool] | None,
    Meta(extra_json_schema=LOGIT_BIAS_SCHEMA),
    doc("Pairs, or an object, of a token id or a text and what is added to the logits of its tokens; false: never"),
]


class Biases(NamedTuple):
    added: Mapping[int, float]
    forbidden: Sequence[int]


def check_logit_bias(biases: list[Pair] | dict[str, float | bool] | None) -> None:
    """Raises FieldError for an entry that is not a pair of a token and a bias."""
    if biases is not None and len(biases) > MAX_BIASES:
        raise FieldError(LOGIT_BIAS, f"may have at most {MAX_BIASES} entries")
    for entry in biases.items() if isinstance(biases, dict) else biases or ():
        if len(entry) != 2 or not _is_token(entry[0]):
            raise FieldError(LOGIT_BIAS, "must have pairs of a token id or a text, and a bias")
        bias = entry[1]
        if bias is not False and type(bias) not in (int, float):
            raise FieldError(LOGIT_BIAS, "must have numbers as biases, or false")


def _is_token(token: Any) -> bool:
    return isinstance(token, str) or (type(token) in (int, float) and token >= 0 and token == int(token))


async def logit_bias_by_token(biases: list[Pair] | dict[str, float | bool] | None, context: ModelContext) -> Biases:
    """Returns the biases by token id. A text stands for all its tokens, and later entries replace earlier ones.

    Raises Unprocessable for ids outside the vocabulary.
    """
    entries = list(_entries(biases))
    texts = [token for token, _ in entries if isinstance(token, str)]
    encoded = iter(await context.tokenizer.encode_batch(texts, False) if texts else [])
    found: dict[int, float | bool] = {}
    for token, bias in entries:
        found |= dict.fromkeys(next(encoded) if isinstance(token, str) else [token], bias)
    check_ids(LOGIT_BIAS, list(found), context.vocab_size)
    return Biases(
        {id: float(max(-MOST_BIAS, min(MOST_BIAS, bias))) for id, bias in found.items() if bias is not False},
        [id for id, bias in found.items() if bias is False],
    )


def _entries(biases: list[Pair] | dict[str, float | bool] | None) -> Iterator[tuple[str | int, float | bool]]:
    """Yields tokens with their biases. In an object, a name that is a number is a token id, and any other name is a
    text."""
    if isinstance(biases, dict):
        for name, bias in biases.items():
            yield (int(name) if name.isascii() and name.isdigit() else name), bias
        return
    for token, value in biases or ():
        yield (token if isinstance(token, str) else int(token)), value  # type: ignore[misc]


# The prompts of llama.cpp's routes: a text, token ids, a mixture of both, or several of these.

SHAPES = "a string, an array of strings and token ids, or an array of either"


class PromptObject(RequestModel):
    ONLY: ClassVar = {"multimodal_data": ([],)}

    prompt_string: str


_Token = Annotated[int, EXACT]
Mixed = list[str | _Token]
One = str | PromptObject | Annotated[Mixed, Meta(min_length=1)]
AnyPrompt = (
    str
    | PromptObject
    | Annotated[list[str | _Token | PromptObject | Annotated[Mixed, Meta(min_length=1)]], Meta(min_length=1)]
)
_piece: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
_mixed: dict[str, Any] = {"type": "array", "items": _piece, "minItems": 1}
_object: dict[str, Any] = {
    "type": "object",
    "properties": {
        "prompt_string": {"type": "string"},
        "multimodal_data": {"anyOf": [{"enum": [[]]}, {"type": "null"}]},
    },
    "required": ["prompt_string"],
    "additionalProperties": False,
}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _object,
        {**_mixed, "contains": {"type": "integer"}},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, _object, _mixed]},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str  # the prompt as text, in which special tokens are spelled out


def several(prompt: AnyPrompt, param: str) -> list[One]:
    """Returns the prompts of a request as a list. An array that contains a token id is one prompt. Raises
    FieldError."""
    if not isinstance(prompt, list):
        return [prompt]
    kinds = {*map(type, prompt)}
    if int in kinds:
        if not kinds <= {int, str}:
            raise FieldError(param, f"must be {SHAPES}", BadRequest, "wrong_type")
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise FieldError(param, f"may have at most {MAX_PROMPTS} entries")
    return prompt  # type: ignore[return-value]


async def tokenized(prompts: Sequence[One], param: str, context: ModelContext) -> list[Prompt]:
    """Encodes prompts. If a prompt begins with a text, the tokenizer puts its special tokens before it.

    Raises BadRequest for a prompt without tokens, Unprocessable for ids outside the vocabulary.
    """
    pieces = [_pieces(one) for one in prompts]
    first = [one[0] for one in pieces if isinstance(one[0], str)]
    later = [piece for one in pieces for piece in one[1:] if isinstance(piece, str)]
    for text in (*first, *later):
        check_characters(param, text, context)
    encode = context.tokenizer.encode_batch
    begins, follows = iter(await encode(first)), iter(await encode(later, False))
    (lead,) = await encode([""])
    before = context.tokenizer.decode(lead, skip_special=False)
    done = []
    for one in pieces:
        ids = list(next(begins)) if isinstance(one[0], str) else [one[0]]
        for piece in one[1:]:
            ids += next(follows) if isinstance(piece, str) else [piece]
        if not ids:
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
        text = before + one[0] if len(one) == 1 and isinstance(one[0], str) else ""
        done.append(Prompt(ids, text or context.tokenizer.decode(ids, skip_special=False)))
    return done


def _pieces(prompt: One) -> Mixed:
    if isinstance(prompt, str):
        return [prompt]
    return [prompt.prompt_string] if isinstance(prompt, PromptObject) else prompt


RANDOM_SEED = (1 << 32) - 1  # in llama.cpp, this seed means a random seed, as -1 does
CHAINED = (  # the fields that have the same names on OpenAI's routes
    "samplers", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_probability", "xtc_threshold", "typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent",
    "repeat_last_n", "min_keep", "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
MOST_SEED = (1 << 64) - 1
_Seed = Annotated[int, Meta(extra_json_schema={"minimum": -1, "maximum": MOST_SEED})]
_Limit = Annotated[int, Meta(ge=-2, le=MOST)]
_Copies = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_AnyTemperature = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]


class AdapterScale(RequestModel):
    id: Annotated[Count, doc("The adapter's place in `/lora-adapters`")]
    scale: Annotated[float, Meta(ge=-LARGEST, le=LARGEST), doc("What its products are multiplied by; 0: not used")]


class Options(RequestModel):
    ONLY: ClassVar = {
        "adaptive_target": (-1.0,), "grammar_lazy": (False,), "grammar_triggers": ([],),
    }  # fmt: skip
    IGNORED: ClassVar[Names] = (
        "id_slot", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "sse_ping_interval",
        "adaptive_decay", "preserved_tokens",
    )  # fmt: skip

    model: ModelName = None
    n_predict: Annotated[_Limit | None, doc("Most tokens of the answer; -1 or absent: to the context's end")] = None
    max_tokens: Annotated[_Limit | None, doc("Another name of `n_predict`")] = None
    max_completion_tokens: Annotated[_Limit | None, doc("Another name of `n_predict`")] = None
    n_cmpl: Annotated[_Copies | None, doc("Answers to each prompt; their seeds follow each other")] = None
    n: Annotated[_Copies | None, doc("Another name of `n_cmpl`")] = None
    n_indent: Indent = 0
    stream: Annotated[bool, doc("Answer in server-sent events")] = False
    stop: Annotated[str | list[str] | None, doc(STOPS)] = None
    temperature: Annotated[_AnyTemperature | None, doc("0 and less: the likeliest token")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-MOST, le=MOST)] | None, doc("0 and less: from all tokens")] = None
    top_p: Annotated[Share | None, doc("Draw from the likeliest tokens that together have this probability")] = None
    min_p: Annotated[Share | None, doc("Draw from tokens at least this share as likely as the likeliest")] = None
    repeat_penalty: Annotated[Factor | None, doc("Above 1: makes tokens of prompt and answer less likely")] = None
    repeat_last_n: RepeatLastN = None
    presence_penalty: Annotated[Penalty | None, doc("Subtracted from the logits of all tokens in the answer")] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each time it is in the answer")
    ] = None
    seed: Annotated[_Seed | None, doc("The same seed gives the same bytes; -1 and 4294967295: a random one")] = None
    grammar: Annotated[str | None, doc("A grammar in GBNF (or Lark) that the answer keeps to; empty: none")] = None
    json_schema: Annotated[JsonSchemaValue | None, doc("A JSON schema that the answer keeps to")] = None
    n_probs: Annotated[
        Count | None,
        doc("Report the probabilities of each token and of this many of the likeliest, up to `--max-logprobs`"),
    ] = None
    logprobs: Annotated[Count | None, doc("Another name of `n_probs`")] = None
    post_sampling_probs: Annotated[
        bool,
        doc("Report those after the samplers, penalties, biases and grammars"),
    ] = False
    lora: Annotated[
        Annotated[list[AdapterScale], Meta(max_length=1000)] | None,
        doc("Answer with an adapter; at most one may have a scale other than 0; absent: as POST /lora-adapters said"),
    ] = None
    return_tokens: Annotated[bool, doc("Report the token ids of the answer; a stream always does")] = False
    return_progress: ReturnProgress = False
    timings_per_token: TimingsPerToken = False
    response_fields: Annotated[
        Annotated[list[str], Meta(max_length=64)] | None,
        doc("Only these fields of the answer; `a/b` is the field `b` within `a`"),
    ] = None
    t_max_predict_ms: Annotated[
        Annotated[int, Meta(ge=-1, le=MOST)] | None,
        doc("End so long after the first token, once the answer has a line break; 0 and -1: never"),
    ] = None
    cache_prompt: Annotated[bool, doc("false: compute the whole prompt")] = True
    logit_bias: LogitBias = None
    ignore_eos: Annotated[bool, doc("The model cannot end its answer")] = False
    samplers: SamplerOrder = None
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
    min_keep: MinKeep = None
    mirostat: Mirostat = None
    mirostat_tau: MirostatTau = None
    mirostat_eta: MirostatEta = None
    deadline_ms: Annotated[Positive | None, doc("Time limit from the request's arrival; then 504")] = None
    receipt: Annotated[bool, doc("Add `receipt`, with which `/v1/receipts/verify` checks the answer")] = False

    def __post_init__(self) -> None:
        check_stops("stop", self.stop)
        if self.seed is not None and not -1 <= self.seed <= MOST_SEED:
            raise FieldError("seed", f"must be from -1 to {MOST_SEED}, got {self.seed!r:.80}")
        check_logit_bias(self.logit_bias)
        check_indent(self.n_indent, self.receipt)
        check_samplers(self.samplers)
        check_breakers(self.dry_sequence_breakers)
        if self.receipt and (self.t_max_predict_ms or 0) > 0:
            raise FieldError("receipt", "cannot go with `t_max_predict_ms`", code="conflicting_fields")

    @property
    def stated_limit(self) -> int | None:
        """The limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
        given: int | None = getattr(self, self.limit_name)
        return None if given is None else max(UNLIMITED, given)

    @property
    def limit(self) -> int:
        """The limit on new tokens; negative: the request states none."""
        given: int | None = getattr(self, self.limit_name)
        return -1 if given is None else given

    @property
    def limit_name(self) -> str:
        """The name of the field with that limit."""
        return self._given("n_predict", "max_completion_tokens", "max_tokens")

    @property
    def copies(self) -> int:
        """How many answers each prompt gets."""
        return getattr(self, self._given("n_cmpl", "n")) or 1

    @property
    def probs(self) -> int:
        """How many likeliest tokens to report for each token; 0: no probabilities."""
        return getattr(self, self.probs_name) or 0

    @property
    def probs_name(self) -> str:
        """The name of the field with that number."""
        return self._given("n_probs", "logprobs")

    def _given(self, *names: str) -> str:
        """Returns the first of a field's names that the request has; the first name if it has none."""
        return next((name for name in names if getattr(self, name) is not None), names[0])

    @property
    def telemetry(self) -> Telemetry | None:
        asked = self.stream and (self.timings_per_token or self.return_progress)
        return Telemetry(self.timings_per_token, self.return_progress) if asked else None

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return [one for one in given or () if one]

    def fields(self) -> TokenDetailFields:
        """Returns the options under OpenAI's names. An absent option gets the server's default."""
        return TokenDetailFields(
            **self._sampling(), seed=None if self.seed in (-1, RANDOM_SEED) else self.seed, stop=self.stops or None,
            n_indent=self.n_indent, stream=self.stream, receipt=self.receipt, deadline_ms=self.deadline_ms,
            grammar=self.grammar or None,
            json_schema=self.json_schema, **{name: getattr(self, name) for name in CHAINED},
            cache_salt=None if self.cache_prompt else secrets.token_hex(16),
        )  # fmt: skip

    def _sampling(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature and max(0.0, self.temperature),
            "top_k": self.top_k and max(0, self.top_k),
            "top_p": self.top_p, "min_p": self.min_p, "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """The data of a request that only llama.cpp's responses need."""

    options: Options
    prompts: tuple[str, ...]
    grammar: str  # the grammar as the client wrote it
    forbidden: tuple[int, ...]  # token ids that may never be drawn
    to_the_end: bool  # whether only the end of the context limits the answer
    n_ctx: int


async def options_request(
    options: Options, prompts: list[Prompt], param: str, context: ModelContext
) -> GenerationRequest:
    """Makes a GenerationRequest. param: the request field that holds the prompt

    Raises BadRequest or Unprocessable, which name the field.
    """
    reading = ParsedRequest(
        fields := options.fields(), param, options.stated_limit, options.limit_name,
        ends_with_context=True, n=options.copies, form=structured_output_fields.openai(fields, None, ""),
        features=Features(output_ms=max(0, options.t_max_predict_ms or 0)),
    )  # fmt: skip
    ids = [prompt.ids for prompt in prompts]
    made = await prepare(reading, ids, context)
    biases = await logit_bias_by_token(options.logit_bias, context)
    ends = (*context.tokenizer.eos_ids, *ends_of(ids, context.tokenizer)) if options.ignore_eos else ()
    forbidden = dict.fromkeys([*biases.forbidden, *ends])
    room = context.max_seq_len - max(len(prompt.ids) for prompt in prompts)
    wanted = Wanted(
        options, tuple(prompt.text for prompt in prompts), options.grammar or "", tuple(forbidden),
        options.limit < 0 or options.limit > room, context.max_seq_len,
    )  # fmt: skip
    ruled = _ruled(made.sampling, options, biases.added, forbidden)
    if options.probs and options.post_sampling_probs:
        ruled = reporting(ruled)
    if options.probs:
        ruled = msgspec.structs.replace(ruled, logprobs=_scored(options, ruled, len(prompts), context))
    return replace(
        made, sampling=ruled,
        shown=replace(made.shown, telemetry=options.telemetry), format_data=wanted,
    )  # fmt: skip


def _ruled(chosen: Sampling, options: Options, added: Mapping[int, float], forbidden: Iterable[int]) -> Sampling:
    """Returns `chosen` with the biases (`added`) and the forbidden ids; with `ignore_eos`, without stop ids."""
    return msgspec.structs.replace(
        chosen, logit_bias=tuple(added.items()), bad_words=tuple((id,) for id in forbidden),
        stop_token_ids=() if options.ignore_eos else chosen.stop_token_ids,
    )  # fmt: skip


def _scored(options: Options, sampling: Sampling, prompts: int, context: ModelContext) -> int:
    """Returns how many likeliest tokens the worker must score for each position. Raises Unprocessable for too many."""
    told = allowed(options.probs, options.probs_name, TokenLimits(context.vocab_size, context.config.max_logprobs))
    check_total(told, prompts * options.copies * sampling.max_tokens, options.probs_name, options.stream)
    return min(needed(told, options.post_sampling_probs, sampling), context.vocab_size)

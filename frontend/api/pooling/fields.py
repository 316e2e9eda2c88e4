"""What requests for vectors and scores share: fields, responses, and how vectors are encoded."""

from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import response_types as openai
from frontend.errors import BadRequest, Internal, SluiceError, Unprocessable
from frontend.model_context import ModelContext, check_characters, check_ids, check_length
from frontend.request import Admission, Features, GenerationRequest, Segments, Usage
from frontend.schema.base import MOST, Names, RequestModel, ResponseModel, in_slices
from frontend.schema.request_fields import ModelName, Positive, SaltField, doc
from frontend.schema.responses import Size
from shared.messages import Pooling, Sampling
from shared.wire import pack_f32, unpack_f32


@dataclass(frozen=True, slots=True)
class Format:
    """An API format for vectors or scores, in a module that has several. See PoolingFormat in routes/pooling.py."""

    NAME: str
    PREFIX: str
    TASKS: tuple[str, ...]
    REQUEST: type[RequestModel]
    parse: Callable[[Any, ModelContext], Awaitable[GenerationRequest]]
    complete: Callable[[ResponseContext, AsyncDeltas], Awaitable[bytes]]
    status: Callable[[SluiceError], int]
    error: Callable[[SluiceError, str], bytes]


# Texts that are longer than the model can read, as the mean of the vectors of their segments.
#
# A request asks for this with `long_inputs`; without it such a text is refused, or cut off where a field says so. A
# text is cut into the fewest segments that the model can read, which differ by at most one token in length, because a
# short rest would get a vector that says little. Each segment begins and ends with the tokens that the tokenizer puts
# around a text, and has the checkpoint's prompt.

LongInputs = Annotated[  # the type of the field `long_inputs`
    Literal["mean"] | None,
    doc(
        "`mean`: a text longer than the model can read is cut into segments, and its vector is the mean of theirs; "
        "absent: the text is refused, unless another field says that it is cut off"
    ),
]


class SegmentedText(NamedTuple):
    """The ids of a text, of which the first `before` and the last `after` are repeated in each of its segments."""

    ids: list[int]
    before: int = 0
    after: int = 0


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many ids two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def segmented(
    texts: Sequence[SegmentedText], most_prompts: int, param: str, context: ModelContext
) -> tuple[list[list[int]], Segments]:
    """Cuts each text that is too long into segments. Returns the prompts, those of one text side by side.

    most_prompts: how many prompts a request may have
    param: the request field with the texts, for errors
    Raises Unprocessable if a segment has no place for the text's own tokens, or if there are too many segments.
    """
    most = context.max_seq_len
    prompts, counts, weights = list[list[int]](), list[int](), list[int]()
    for ids, before, after in texts:
        if len(ids) <= most or most < 1:
            counts.append(1)
            prompts.append(ids)
            weights.append(1)
            continue
        free, end = most - before - after, len(ids) - after
        if free < 1:
            raise Unprocessable(
                f"`long_inputs`: the prompt before each text and the tokenizer's own tokens have {before + after} "
                f"tokens, and the model can read {most}",
                param="long_inputs",
                code="out_of_range",
            )
        count = -(-(end - before) // free)
        if len(prompts) + count > most_prompts:
            raise Unprocessable(
                f"`{param}` makes more than {most_prompts} segments of up to {most} tokens", param=param,
                code="context_length_exceeded",
            )  # fmt: skip
        cuts = [before + (end - before) * at // count for at in range(count + 1)]
        for first, last in pairwise(cuts):
            prompts.append(ids[:before] + ids[first:last] + ids[end:])
            weights.append(last - first)
        counts.append(count)
    return prompts, Segments(tuple(counts), tuple(weights))


async def merged(packed: Sequence[bytes], segments: Segments, unit: bool) -> list[bytes]:
    """Returns one vector per text, as packed float32: the mean of its segments' vectors, weighted by their tokens.

    packed: the vectors of all segments; a text's only one is returned as it is, bit for bit
    unit: whether vectors get the length 1
    """
    found, at = list[bytes](), 0
    for count in segments.counts:
        found.append(packed[at] if count == 1 else await _mean(packed, range(at, at + count), segments.weights, unit))
        at += count
    return found


async def _mean(packed: Sequence[bytes], places: range, weights: Sequence[int], unit: bool) -> bytes:
    total = array("d", bytes(2 * len(packed[places.start])))  # a double has twice the bytes of a float32

    def add(place: int) -> None:
        weight = weights[place]
        for index, number in enumerate(unpack_f32(packed[place])):
            total[index] += weight * number

    await in_slices(places, add)  # in the order of the text, so that the sum has the same bits each time
    length = sqrt(sum([number * number for number in total])) if unit else sum(weights[place] for place in places)
    return pack_f32([number / length for number in total] if length else total)


MAX_INPUTS = 2048
SEGMENTS = "With `long_inputs`: of how many segments the vector is the mean"
Prompt = list[int]


class PoolingFields(RequestModel):
    # Fields for unsupported features of other servers, each with the values that leave the feature off.
    ONLY: ClassVar = {
        **dict.fromkeys(("use_activation", "activation", "softmax"), (True,)),
        "embed_dtype": ("float32",), "endianness": ("native", "little"),
    }  # fmt: skip
    IGNORED: ClassVar[Names] = ("user",)

    model: ModelName = None
    cache_salt: SaltField = None
    priority: Annotated[
        int, Meta(ge=-MOST - 1, le=MOST), doc("Lower values run first, among requests of one API key's name")
    ] = 0
    deadline_ms: Annotated[Positive | None, doc("Time limit from the request's arrival; then 504")] = None


def only_without(name: str) -> dict[str, Sequence[Any]]:
    """Returns the fields of unsupported features without one that a type of requests supports."""
    return {field: values for field, values in PoolingFields.ONLY.items() if field != name}


class CutFields(PoolingFields):
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MOST)] | None,
        doc("Keep only this many tokens of each text, with the tokenizer's own; -1: as many as the model can read"),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, doc("`left`: `truncate_prompt_tokens` keeps the last tokens of a text")
    ] = None

    @property
    def cut(self) -> "Cut | None":
        """How texts that are too long are cut; None: they are refused."""
        return self.stated_cut

    @property
    def stated_cut(self) -> "Cut | None":
        """What `truncate_prompt_tokens` says."""
        kept = self.truncate_prompt_tokens
        return None if kept is None else Cut(kept, self.truncation_side == "left", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text that is too long is cut. The tokens that the tokenizer puts around a text are kept.

    most: how many tokens are kept; -1: as many as the model can read
    left: whether the first tokens are cut off instead of the last ones
    param: the field that asks for it
    """

    most: int = -1
    left: bool = False
    param: str = "truncate"

    def limit(self, context: ModelContext) -> int:
        """Returns how many tokens are kept. Raises Unprocessable if the model cannot read so many, or none is left."""
        around = sum(context.tokenizer.around)
        if self.most < 0:
            return context.max_seq_len
        if not around < self.most <= context.max_seq_len:
            raise Unprocessable(
                f"`{self.param}` must be -1 or from {around + 1} to {context.max_seq_len}, got {self.most}",
                param=self.param,
                code="out_of_range",
            )
        return self.most

    def __call__(self, ids: Prompt, context: ModelContext, *, around: bool = True, second: int = 0) -> Prompt:
        """Returns at most `limit` ids of a text.

        around: whether the tokenizer has put its own tokens around it
        second: where the second text of a pair begins, before which nothing is cut off; 0: it is no pair
        """
        most = self.limit(context)
        if len(ids) <= most or most < 1:
            return ids
        before, after = context.tokenizer.around if around else (0, 0)
        before = second or before
        if self.left and before + after < most:
            return ids[:before] + ids[len(ids) - (most - before) :]
        return ids[: most - after] + ids[len(ids) - after :]


def pooling_request(
    fields: PoolingFields, prompts: Sequence[Prompt], pooling: Pooling, context: ModelContext, format_data: Any = None,
    seconds: Sequence[int] = (), segments: Segments | None = None,
) -> GenerationRequest:  # fmt: skip
    """Makes a GenerationRequest for one vector per prompt, or per text if the prompts are segments of texts.

    format_data: data that only the response needs
    seconds: for each prompt, where the second text of a pair begins; empty: prompts are no pairs
    """
    return GenerationRequest(
        tuple(prompts), Sampling(0), model=context.model, admission=admission(fields),
        features=Features(pooling=pooling, adapter=context.adapter, seconds=tuple(seconds), segments=segments),
        format_data=format_data,
    )  # fmt: skip


def admission(fields: PoolingFields) -> Admission:
    return Admission(fields.cache_salt or "", fields.deadline_ms or 0, fields.priority)


def check_texts(param: str, texts: Iterable[str], context: ModelContext) -> None:
    """Raises ContextLengthExceeded, without tokenizing, for a text with too many characters to fit."""
    for text in texts:
        check_characters(param, text, context)


def check_prompts(param: str, prompts: Sequence[Prompt], context: ModelContext) -> None:
    """Raises BadRequest for a prompt without tokens, Unprocessable for a prompt that is too long or has an unknown
    id."""
    for ids in prompts:
        if not ids:
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
        check_length(param, len(ids), 0, context)


def check_seconds(param: str, prompts: Sequence[Prompt], seconds: Sequence[int], context: ModelContext) -> None:
    """Raises ContextLengthExceeded if the first text of a pair leaves no room for the second, after both were cut."""
    for ids, second in zip(prompts, seconds, strict=False):
        if second >= len(ids):
            check_length(param, context.max_seq_len + 1, 0, context)


# The JSON types of the responses with vectors or scores.


class PoolingUsage(ResponseModel):
    prompt_tokens: Size
    total_tokens: Size


class Embedding(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: Size
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or the base64 of little-endian float32")]
    segments: Annotated[Size | UnsetType, Meta(description=SEGMENTS)] = UNSET


class Embeddings(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(ResponseModel):
    index: Size
    object: Literal["score"] = "score"
    score: float


class Scores(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[Score]
    usage: PoolingUsage


class ScoredTokens(ResponseModel):
    """A row: arrays with an entry for each token (null for a prompt's first token), or each array's bytes in base64."""

    index: Size
    token_ids: list[Size] | str | UnsetType = UNSET
    token_logprobs: list[float | None] | str
    top_token_ids: list[list[Size] | None] | str | UnsetType = UNSET
    top_logprobs: list[list[float] | None] | str | UnsetType = UNSET


class ScoredTokensList(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[ScoredTokens]
    usage: openai.Usage


class Binary(NamedTuple):
    """A response that is not JSON, with additional headers."""

    data: bytes
    headers: dict[str, str]


class RankedText(ResponseModel):
    text: str


class Ranked(ResponseModel):
    index: Annotated[Size, Meta(description="Of the document in the request")]
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedInput(ResponseModel):
    """An entry of the response to a body with `texts`."""

    index: Annotated[Size, Meta(description="Of the text in the request")]
    score: float
    text: str | UnsetType = UNSET


class CohereUnits(ResponseModel):
    input_tokens: Size


class CohereMeta(ResponseModel):
    billed_units: CohereUnits
    api_version: dict[str, str]


class Ranking(ResponseModel):
    id: str
    model: str
    results: Annotated[list[Ranked], Meta(description="The most relevant one first")]
    usage: PoolingUsage
    meta: Annotated[CohereMeta, Meta(description="What Cohere's API tells; some of its clients require it")]


def meta_of(usage: Usage, version: str) -> CohereMeta:
    """Returns what a response says of its request. version: of Cohere's API"""
    return CohereMeta(billed_units=CohereUnits(input_tokens=usage.prompt_tokens), api_version={"version": version})


def usage_of(usage: Usage) -> PoolingUsage:
    return PoolingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)


# Collects the vectors of a request from its deltas.


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How a response writes its vectors.

    norm: llama.cpp's `embd_normalize`; None: as the worker sent them
    raw: whether the labels of a classification head are logits instead of probabilities
    """

    base64: bool = False
    norm: int | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector per prompt or text, as packed float32, and the usage of all prompts together."""

    packed: list[bytes]
    usage: Usage

    def floats(self, index: int) -> "array[float]":
        return unpack_f32(self.packed[index])

    def cosine(self, one: int, other: int) -> float:
        """Returns the cosine of the angle between two vectors; 0 if one of them is zero."""
        a, b = self.floats(one), self.floats(other)
        lengths = sqrt(_dot(a, a)) * sqrt(_dot(b, b))
        return _dot(a, b) / lengths if lengths else 0.0


async def collect(context: ResponseContext, arriving: AsyncDeltas) -> Vectors:
    """Waits for all vectors of a request: one per prompt or, if prompts are segments of texts, one per text.

    Raises SluiceError if one of its prompts failed.
    """
    packed = [b""] * len(context.request.prompts)
    tokens = cached = 0
    async for deltas in arriving:
        for delta in deltas:
            packed[delta.index] = delta.extras.vector
            if delta.usage is not None:
                tokens, cached = tokens + delta.usage.prompt_tokens, cached + delta.usage.cached_tokens
    if not all(packed):
        raise Internal("the worker sent no vector", code="worker_error")
    features = context.request.features
    if features.segments is not None:
        unit = features.pooling is not None and features.pooling.normalized
        packed = await merged(packed, features.segments, unit)
    return Vectors(packed, Usage(tokens, 0, cached))


def _dot(one: "array[float]", other: "array[float]") -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])

"""llama.cpp's routes about the server: its properties, slots and adapters.

This server has no fixed slots. It lists as many slots as the workers can run sequences at once, and shows each request
as a busy slot, those that already have output first. A client sees only the requests of its own API key, without their
prompts. All other slots look idle to that client.
"""

import base64
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.llama_cpp import types
from frontend.api.llama_cpp.completion import error, settings, status
from frontend.api.llama_cpp.options import PROMPT_SCHEMA, AnyPrompt, Options, PromptObject, Wanted, several, tokenized
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import LongInputs, PoolingFields, VectorForm, collect
from frontend.api.request_builder import sampling
from frontend.errors import BadRequest
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, JsonArray, in_slices, to_json
from frontend.schema.request_fields import doc
from frontend.workers.stream import Stream
from shared import build
from shared.messages import Adapter, PoolingKind
from shared.wire import unpack_u32


def props(context: ModelContext, slots: int) -> types.LlamaCppProps:
    """Returns the properties of the server. slots: how many slots the server lists"""
    named = context.tokenizer.named_tokens
    return types.LlamaCppProps(
        default_generation_settings=types.LlamaCppDefaults(n_ctx=context.max_seq_len, params=_defaults(context)),
        total_slots=slots,
        model_alias=context.model,
        model_path=context.model,
        modalities={"vision": context.tokenizer.image_format is not None, "audio": False},
        chat_template=context.tokenizer.templates.get("default", ""),
        bos_token=named.get("bos_token") or "",
        eos_token=named.get("eos_token") or "",
        build_info=f"sluice-{build.version()}",
    )


def _defaults(context: ModelContext) -> types.LlamaCppSettings:
    options = Options()
    chosen = sampling(options.fields(), 0, context)
    return settings(chosen, Wanted(options, (), "", (), True, context.max_seq_len), None, ())


def slots(context: ModelContext, total: int, streams: Sequence[Stream]) -> list[types.LlamaCppSlot]:
    """Lists the slots. streams: the requests that the client may see, as busy slots; other slots look idle"""
    busy = [
        types.LlamaCppSlot(
            id=id,
            n_ctx=context.max_seq_len,
            is_processing=True,
            n_prompt_tokens=len(unpack_u32(stream.submit.prompt)),
            next_token=types.LlamaCppNextToken(n_decoded=len(stream.output)),
        )
        for id, stream in enumerate(sorted(streams, key=lambda one: not one.output)[:total])
    ]
    idle = range(len(busy), total)
    return busy + [types.LlamaCppSlot(id=id, n_ctx=context.max_seq_len, is_processing=False) for id in idle]


def adapters(known: Iterable[Adapter], default: Adapter | None) -> list[types.LlamaCppAdapter]:
    """Lists adapters with their scales for requests that name none. Only the default adapter's scale is not 0.

    `path` has the last part of an adapter's path, because clients need not know the server's folders.
    """
    return [
        types.LlamaCppAdapter(
            id=id, path=Path(one.path).name, scale=default.scale if default and default.name == one.name else 0.0
        )
        for id, one in enumerate(known)
    ]


# llama.cpp's /embedding and /embeddings: an array of vectors, normalized as the client asks.

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]
NAME, PREFIX, TASKS = "llama.cpp embedding", "embd", ("embed",)
NONE, LARGEST, EUCLIDEAN = -1, 0, 2
INT16 = 32760.0  # the largest absolute value of a vector that is scaled with `embd_normalize` 0
_Inputs = Annotated[
    AnyPrompt | None, Meta(extra_json_schema=PROMPT_SCHEMA), doc("A text, token ids, a mixture, or several")
]


class LlamaCppEmbeddingRequest(PoolingFields):
    content: _Inputs = None
    input: Annotated[_Inputs, doc("Another name of `content`, which goes before it")] = None
    encoding_format: Annotated[Literal["float", "base64"], doc("`base64`: little-endian float32")] = "float"
    embd_normalize: Annotated[
        Annotated[int, Meta(ge=NONE, le=1000)] | None,
        doc(
            "-1: not; 0: the largest becomes 32760; 1: taxicab; 2: Euclidean; p: p-norm; "
            "absent: as the checkpoint says, and not with `pooling`"
        ),
    ] = None
    pooling: Annotated[
        Literal["none"] | None,
        doc("`none`: a vector for each token; absent: one for each input, as the checkpoint says"),
    ] = None
    long_inputs: LongInputs = None

    def __post_init__(self) -> None:
        if self.content is None and self.input is None:
            raise FieldError("content", "is missing", BadRequest, "missing_field")
        several(self.prompt, self.param)

    @property
    def param(self) -> str:
        return "content" if self.input is None else "input"

    @property
    def prompt(self) -> AnyPrompt:
        given = self.content if self.input is None else self.input
        assert given is not None
        return given


REQUEST = LlamaCppEmbeddingRequest


async def parse(request: LlamaCppEmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    inputs: list[str | list[int]] = []
    for one in several(request.prompt, request.param):
        text = one.prompt_string if isinstance(one, PromptObject) else one
        inputs.append(text if isinstance(text, str) else (await tokenized([text], request.param, context))[0].ids)
    norm = request.embd_normalize
    form = VectorForm(request.encoding_format == "base64", norm)
    normalized = None if norm is None and request.pooling is None else norm == EUCLIDEAN
    return await embedding_request(
        request, inputs, context, param=request.param, format_data=form, normalized=normalized,
        kind=None if request.pooling is None else PoolingKind.TOKENS, long=request.long_inputs,
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors, request = await collect(context, arriving), context.request
    form: VectorForm = request.format_data
    of_tokens = request.features.pooling is not None and request.features.pooling.kind is PoolingKind.TOKENS
    written = JsonArray(each=4)

    def write(index: int) -> None:
        count = len(request.prompts[index]) if of_tokens else 1
        rows = [_scaled(row, form.norm) for row in _rows(vectors.floats(index), count)]
        shown: Any = _in_base64(rows) if form.base64 else [row.tolist() for row in rows]
        written.append(types.LlamaCppEmbedding(index=index, embedding=shown))

    await in_slices(range(len(vectors.packed)), write)
    raw: Any = written.raw
    return to_json(raw)


def _rows(numbers: "array[float]", count: int) -> "list[array[float]]":
    """Returns `count` vectors of the same length, which lie one after another in `numbers`."""
    width = len(numbers) // count
    return [numbers[at : at + width] for at in range(0, count * width, width)]


def _scaled(vector: "array[float]", norm: int | None) -> "array[float]":
    if norm in (None, NONE, EUCLIDEAN):  # if the vector shall be normalized, the worker has done it
        return vector
    peak = max(map(abs, vector))
    length = (
        peak / INT16 if norm == LARGEST else peak and peak * sum((abs(x) / peak) ** norm for x in vector) ** (1 / norm)
    )
    return array("f", [x / length for x in vector]) if length else vector


def _in_base64(vectors: "Iterable[array[float]]") -> str:
    return base64.b64encode(b"".join(vector.tobytes() for vector in vectors)).decode()

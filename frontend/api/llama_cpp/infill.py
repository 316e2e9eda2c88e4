"""llama.cpp's /infill: generates the text between two parts of a file, for models trained to fill in the middle.

The texts of a request are plain text: the spelling of a special token in them does not become that token.
"""

from typing import Annotated, ClassVar

from msgspec import Meta

from frontend.api.llama_cpp.completion import FRAMING, complete, error, status, stream_error, stream_writer
from frontend.api.llama_cpp.options import Options, Prompt, options_request
from frontend.errors import NotSupported
from frontend.model_context import ModelContext, check_characters, check_ids, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import Names, RequestModel
from frontend.schema.request_fields import doc
from frontend.text.fill_in_middle import Layout, filled, layout_of, repository_marks

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip

NAME, PREFIX = "llama.cpp infill", "infill"
MAX_FILES = 1024
RESERVED = 256  # tokens of the context that `input_extra` leaves free for an answer without a limit
REPOSITORY, FILE = "myproject\n", "filename\n"  # llama.cpp's default names; no request field sets them


class ExtraFile(RequestModel):
    # `time`: when llama.vim read the file
    IGNORED: ClassVar[Names] = ("time",)

    text: str
    filename: str | None = None


class InfillRequest(Options):
    input_prefix: Annotated[str, doc("What stands before the cursor")]
    input_suffix: Annotated[str, doc("What stands after the cursor")]
    prompt: Annotated[str, doc("How the answer begins")] = ""
    input_extra: Annotated[
        Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None,
        doc("Other files, which stand before; the first parts are left out if not all fits"),
    ] = None


REQUEST = InfillRequest


async def parse(request: InfillRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises NotSupported, BadRequest or Unprocessable."""
    check_model(request.model, context)
    layout = layout_of(context.tokenizer)
    if layout is None:
        raise NotSupported(
            "this model cannot fill in the middle: its tokenizer has no tokens for it", code="unsupported_route"
        )
    ids = await _prompt(request, layout, context)
    prompt = Prompt(ids, context.tokenizer.decode(ids, skip_special=False))
    return await options_request(request, [prompt], "input_prefix", context)


async def _prompt(request: InfillRequest, layout: Layout, context: ModelContext) -> list[int]:
    for field in ("input_prefix", "input_suffix", "prompt"):
        check_characters(field, getattr(request, field), context)
    tokenizer = context.tokenizer
    files = request.input_extra or []
    texts = [text for file in files for text in (f"{file.filename or 'tmp'}\n", file.text)]
    before, after, begun, name, here, *others = await tokenizer.encode_plain(
        [request.input_prefix, request.input_suffix, request.prompt, REPOSITORY, FILE, *texts], False
    )
    (lead,) = await tokenizer.encode_batch([""])
    asked = [*filled(layout, before, after, tokenizer), *begun]
    extra: list[int] = []
    if marks := repository_marks(tokenizer):
        repository, file = marks
        for title, content in zip(others[::2], others[1::2], strict=True):
            extra += [file, *title, *content]
        extra, begin = [*extra, file, *here], [*lead, repository, *name]
    else:
        extra, begin = [id for content in others[1::2] for id in content], lead
    room = context.max_seq_len - len(begin) - len(asked) - (request.limit if request.limit > 0 else RESERVED)
    kept = extra[-room:] if room > 0 else []
    ids = [*begin, *kept, *asked]
    check_ids("input_prefix", ids, context.vocab_size)
    return ids

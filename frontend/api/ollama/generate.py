"""Ollama's /api/generate: answers a prompt or, with `raw`, continues its text.

A stream's lines hold parts of the generated text.
"""

from typing import Annotated, Any, ClassVar

from msgspec import UNSET
from msgspec.structs import replace

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.ollama import output, types
from frontend.api.ollama import output as envelope
from frontend.api.ollama.output import AnswerPart, LineWriter, check_model, error, status, stream_error
from frontend.api.ollama.types import AnswerFields, Asked, Images, with_images
from frontend.api.request_builder import prepare
from frontend.chat.history import chat_message
from frontend.chat.prompt import Prompt, render_prompt
from frontend.errors import BadRequest
from frontend.model_context import ModelContext, check_characters, check_ids
from frontend.output_parser.model_format import Reasoning, ToolChoice
from frontend.request import GenerationRequest
from frontend.schema.request_fields import TextIds, doc
from frontend.server.sse import JSON_LINES
from frontend.text.fill_in_middle import with_suffix

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip

NAME, PREFIX = "ollama generate", "text"
FRAMING = JSON_LINES


class OllamaTextRequest(AnswerFields):
    ONLY: ClassVar = {**AnswerFields.ONLY, "template": ("",)}

    prompt: Annotated[str, doc("The text to answer; empty, also `suffix`: answer at once that the model is loaded")] = (
        ""
    )
    suffix: Annotated[str, doc("The text after the answer, for models that fill in the middle")] = ""
    system: Annotated[str, doc("What stands before the prompt")] = ""
    images: Images = None
    raw: Annotated[bool, doc("Continue the prompt as it is, without the chat template")] = False
    context: Annotated[TextIds | None, doc("The `context` of the previous answer")] = None


REQUEST = OllamaTextRequest


async def parse(request: OllamaTextRequest, context: ModelContext) -> GenerationRequest | bytes:
    """Makes a GenerationRequest. A request without a prompt only loads the model, so its response is returned instead.

    Raises NotFound, BadRequest or Unprocessable.
    """
    check_model(request.model, context)
    if not (request.prompt or request.suffix):
        return envelope.loaded(request, lambda fields: types.OllamaText(response="", **fields))
    before = request.context or []
    check_ids("context", before, context.vocab_size)
    made = await _prompt(request, context)
    prompt = before + made.ids
    images = tuple(replace(image, start=len(before) + image.start) for image in made.images)
    as_text = request.raw or bool(request.suffix)
    reading = request.reading("prompt", None if as_text else ToolChoice(), None if request.raw else prompt)
    return await prepare(reading, [prompt], context, made.begins, images)


async def _prompt(request: OllamaTextRequest, context: ModelContext) -> Prompt:
    """Returns the prompt: a chat of one turn or, with `raw` or `suffix` or without a template, the text itself."""
    if context.template and not (request.raw or request.suffix):
        system = [chat_message("system", request.system)] if request.system else []
        said, sources = with_images(request.images, request.prompt)
        messages = [*system, chat_message("user", said) | sources]
        return await render_prompt(messages, context, request.template_arguments(context), param="prompt")
    if request.images:
        raise BadRequest(
            "`images` need the model's chat template, so not `raw` or `suffix`", param="images",
            code="unsupported_content",
        )  # fmt: skip
    before = request.system or (context.preset.system if context.preset and not request.raw else "")
    text = "\n\n".join([one for one in (before, request.prompt) if one])
    check_characters("prompt", text, context)
    ids = await context.tokenizer.encode(text, not request.context)
    if not (ids or request.suffix):
        raise BadRequest("`prompt` has no tokens", param="prompt", code="empty_prompt")
    check_ids("prompt", ids, context.vocab_size)
    if request.suffix:
        [ids] = await with_suffix([ids], request.suffix, context.tokenizer)
    return Prompt(ids, Reasoning.DONE)


def stream_writer(context: ResponseContext) -> LineWriter:
    return LineWriter(context, _answers(context))


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    return await output.complete(context, arriving, _answers(context))


def _answers(context: ResponseContext) -> output.Make:
    asked: Asked = context.request.format_data
    before = asked.before

    def answer(said: AnswerPart, ids: list[int], fields: dict[str, Any]) -> types.OllamaText:
        told = UNSET if before is None or not fields.get("done") else [*before, *ids]
        return types.OllamaText(response=said.text, thinking=said.thinking or UNSET, context=told, **fields)

    return answer

"""llama.cpp's /completion: continues texts, and reports statistics about each answer."""

from typing import Annotated

from msgspec import Meta

from frontend.api.answer import ResponseContext
from frontend.api.llama_cpp.options import PROMPT_SCHEMA, AnyPrompt, Options, options_request, several, tokenized
from frontend.api.llama_cpp.output import EventWriter, complete, error, status, stream_error
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.server.sse import SERVER_SENT_EVENTS

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip

NAME, PREFIX = "llama.cpp completion", "cmpl"
FRAMING = SERVER_SENT_EVENTS


class LlamaCppCompletionRequest(Options):
    prompt: Annotated[
        AnyPrompt,
        Meta(description="A text, token ids, a mixture of both, or several of these", extra_json_schema=PROMPT_SCHEMA),
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        several(self.prompt, "prompt")


REQUEST = LlamaCppCompletionRequest


async def parse(request: LlamaCppCompletionRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    prompts = await tokenized(several(request.prompt, "prompt"), "prompt", context)
    return await options_request(request, prompts, "prompt", context)


def stream_writer(context: ResponseContext) -> EventWriter:
    return EventWriter(context)

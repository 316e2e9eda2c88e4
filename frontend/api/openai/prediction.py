"""`prediction`: a text that the client expects as the answer. It speeds up the answer without changing it."""

from dataclasses import replace
from typing import Annotated, Literal

from msgspec import Meta

from frontend.api.chat.chat_prompt import MAX_PARTS
from frontend.api.model_context import ModelContext
from frontend.api.openai.content_parts import TextPart
from frontend.api.prepare import Reading
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import doc


class Prediction(RequestModel):
    type: Literal["content"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


PredictionField = Annotated[
    Prediction | None,
    doc("A text that the answer will mostly repeat. It speeds up the answer without changing it"),
]


async def with_prediction(reading: Reading, prediction: Prediction | None, context: ModelContext) -> Reading:
    """Returns `reading` with the ids of the expected answer, cut to the length of the context."""
    if prediction is None:
        return reading
    said = prediction.content
    text = said if isinstance(said, str) else "".join([part.text for part in said])
    ids = await context.tokenizer.encode(text, add_special_tokens=False)
    known = tuple(id for id in ids[: context.max_seq_len] if id < context.vocab_size)
    return replace(reading, features=replace(reading.features, predicted=known))

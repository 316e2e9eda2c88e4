"""What the routes of Text Embeddings Inference share: fields, and how errors are written.

https://huggingface.github.io/text-embeddings-inference
"""

from typing import Annotated, Literal

from msgspec import Meta

from frontend.api.pooling.fields import MAX_INPUTS, Cut, PoolingFields
from frontend.errors import BadRequest, Overloaded, SluiceError, Unprocessable
from frontend.schema.base import ResponseModel, to_json
from frontend.schema.request_fields import Text, doc

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


PromptName = Annotated[Text | None, doc("Which of the checkpoint's prompts stands before each text")]
Truncate = Annotated[bool | None, doc("true: a text that is too long is cut; absent or false: it is refused")]
Direction = Annotated[Literal["left", "right", "Left", "Right"], doc("Which end of a text is cut off")]


def cut_of(truncate: bool | None, direction: str) -> Cut | None:
    """Returns how texts that are too long are cut; None: they are refused."""
    return Cut(left=direction.lower() == "left") if truncate else None


class TeiFields(PoolingFields):
    truncate: Truncate = None
    truncation_direction: Direction = "right"

    @property
    def cut(self) -> Cut | None:
        """How texts that are too long are cut; None: they are refused."""
        return cut_of(self.truncate, self.truncation_direction)


class TeiError(ResponseModel):
    error: str
    error_type: str


def status(exc: SluiceError) -> int:
    """Returns the status: 429 while there is no room, 424 for a failure of the model, 422 for what is not accepted."""
    if isinstance(exc, Overloaded):
        return 429
    if isinstance(exc, BadRequest | Unprocessable):
        return 422
    return 424 if exc.status == 500 else exc.status


def error(exc: SluiceError, request_id: str) -> bytes:
    kinds = {422: "Validation", 424: "Backend", 429: "Overloaded"}
    return to_json(TeiError(error=exc.message, error_type=kinds.get(status(exc), "Backend")))

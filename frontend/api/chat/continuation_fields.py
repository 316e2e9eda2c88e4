"""The field `continue_from`, which names an earlier answer by its token ids or by its receipt."""

from typing import Annotated, Any, ClassVar

from frontend.api.receipts.receipt import Receipt
from frontend.api.requests.request_model import FieldError, RequestModel
from frontend.api.requests.request_types import Count, TextIds, doc
from frontend.errors import BadRequest

FIELD = "continue_from"


def _given(name: str) -> dict[str, Any]:
    """Returns a JSON schema that requires a non-null value of the field `name`."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class ContinueFrom(RequestModel):
    SCHEMA: ClassVar = ({"oneOf": [_given("ids"), _given("receipt")]},)

    ids: Annotated[TextIds | None, doc("The tokens of an answer")] = None
    receipt: Annotated[Receipt | None, doc("The receipt of an answer, in place of `ids`")] = None
    position: Annotated[Count | None, doc("How many of its tokens to keep, from the first on; absent: all")] = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.receipt is None):
            raise FieldError("ids", "or else `receipt` must be given", BadRequest, "missing_field")


ContinueFromField = Annotated[ContinueFrom | None, doc("Go on from a place in an answer to the same prompt")]

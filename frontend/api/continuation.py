"""`continue_from`: the server continues an earlier answer from any of its tokens on.

A client names the earlier answer by its token ids or by its receipt, and otherwise sends the same request again.
Everything that counts the tokens of an answer (`max_tokens`, `min_tokens`, penalties, a budget for reasoning, the
random numbers) also counts the tokens of the earlier answer. Therefore the continuation equals the rest of the earlier
answer.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from frontend.api.receipts import Receipt, prompt_hash
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext, check_ids
from frontend.schema.base import FieldError, RequestModel
from frontend.schema.request_fields import Count, GenerationFields, TextIds, doc
from shared.messages import PromptImage


def continued_ids(
    request: GenerationFields,
    prompts: Sequence[list[int]],
    max_tokens: int,
    context: ModelContext,
    images: Sequence[PromptImage] = (),
) -> tuple[int, ...]:
    """Returns the first tokens of the earlier answer, which the new answer shall begin with.

    prompts: the prompts of the request, as ids; images: the images of the prompt
    max_tokens: the limit on the whole answer, including its earlier tokens

    Raises Unprocessable if the request cannot continue that answer.
    """
    given: ContinueFrom = getattr(request, FIELD)
    _check_conflicts(request, len(prompts))
    ids = _ids_of_receipt(given.receipt, prompt_hash(prompts[0], images), context) if given.receipt else given.ids or []
    source = "receipt" if given.receipt else "ids"
    check_ids(f"{FIELD}.{source}", ids, context.vocab_size)
    position = len(ids) if given.position is None else given.position
    if position > len(ids):
        raise _refusal("position", f"is {position}, but the answer has {len(ids)} tokens")
    if position > max_tokens:
        raise _refusal(
            "position" if given.position is not None else source,
            f"leaves nothing to generate: {position} tokens are there, and `max_tokens`, which counts them, too, is "
            f"{max_tokens}",
        )
    return tuple(ids[:position])


def _ids_of_receipt(receipt: Receipt, prompt: str, context: ModelContext) -> list[int]:
    """Returns the token ids in the receipt. prompt: the hash of the request's prompt.

    Raises Unprocessable for the receipt of another model or prompt.
    """
    if receipt.model not in {context.model, *context.names}:
        raise _refusal("receipt.model", f"is `{receipt.model}`, but this server serves `{context.model}`")
    if receipt.prompt_sha256 != prompt:
        raise _refusal("receipt.prompt_sha256", "is that of another prompt than the request's")
    if receipt.signature_check == "invalid":
        raise _refusal("receipt.signature", "is not valid: the receipt was changed after it was signed")
    return receipt.output_ids


def _check_conflicts(request: GenerationFields, prompts: int) -> None:
    """Raises Unprocessable for a field that asks about tokens which a continuation does not compute again."""
    if prompts > 1:
        raise Unprocessable(f"`{FIELD}` needs a single prompt", param=FIELD, code="conflicting_fields")
    asked: dict[str, Any] = {"echo": False, "prompt_logprobs": None}
    for name, absent in asked.items():
        if getattr(request, name, absent) != absent:
            raise Unprocessable(f"`{FIELD}` cannot go with `{name}`", param=name, code="conflicting_fields")


def _refusal(field: str, problem: str) -> Unprocessable:
    param = f"{FIELD}.{field}"
    return Unprocessable(f"`{param}` {problem}", param=param, code="out_of_range")


# The field `continue_from`, which names an earlier answer by its token ids or by its receipt.

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

"""Budgets for reasoning: the fields that set one, and what the worker needs to end the reasoning of an output by it."""

from collections.abc import Sequence
from typing import Annotated

from frontend.api.common import ModelContext
from frontend.api.request_model import RequestModel
from frontend.api.request_types import Count, doc
from frontend.errors import Unprocessable
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.reasoning_marks import reasoning_marks
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling, ThinkingBudget

BLANKS = ("\n", "\n\n", " ")  # what a model may write before it opens its reasoning

MaxThinkingTokens = Annotated[
    Count | None, doc("Most tokens of reasoning; then it is ended, and the answer follows. Usage counts them as any")
]
OtherBudgetName = Annotated[Count | None, doc("Another name of `max_thinking_tokens`")]
NAMES = ("max_thinking_tokens", "thinking_budget", "thinking_token_budget")  # ours, Qwen's, vLLM's


def asked(request: RequestModel, nested: int | None) -> tuple[int | None, str]:
    """Returns the budget that a request sets, and the field that sets it; None for no limit.

    nested: the value of `reasoning.max_tokens`
    """
    values = {name: getattr(request, name) for name in NAMES} | {"reasoning.max_tokens": nested}
    given = {name: value for name, value in values.items() if value is not None}
    if len({*given.values()}) > 1:
        first, second, *_ = given
        raise Unprocessable(f"`{first}` and `{second}` differ", param=second, code="conflicting_fields")
    return next(((value, name) for name, value in given.items()), (None, NAMES[0]))


def thinking_budget(
    tokens: int | None, param: str, begins: Reasoning, max_tokens: int, context: ModelContext
) -> ThinkingBudget | None:
    """Returns how the worker limits an output's reasoning to `tokens`; None where nothing can exceed them.

    begins: where the output begins
    max_tokens: the limit on the whole output

    Raises Unprocessable for a tokenizer in which the end of reasoning is several tokens.
    """
    style = context.style
    if tokens is None or tokens >= max_tokens or not style.has_reasoning or begins is Reasoning.DONE:
        return None
    marks, tokenizer = reasoning_marks(style.tool_format, style.tags), context.tokenizer
    forced = _ids(marks.forced, tokenizer)
    opening, closing = _ids(marks.opening, tokenizer), _ids((marks.closing,), tokenizer)
    if len(closing) != 1:
        raise Unprocessable(
            f"`{param}` cannot be enforced: this model's tokenizer has no token {marks.closing}",
            param=param, code="unsupported_field",
        )  # fmt: skip
    after, *following = marks.forbidden or ("",)
    blanks = _ids([text for text in BLANKS if len(_ids([text], tokenizer)) == 1], tokenizer)
    return ThinkingBudget(
        tokens, opening, closing[0], forced,
        begun=begins is Reasoning.OPEN,
        blanks=None if marks.anywhere else blanks,
        forbidden=((*_ids((after,), tokenizer), _ids(following, tokenizer)[0]),) if following else (),
    )  # fmt: skip


def _ids(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(id for ids in tokenizer.encode_now(texts, False) for id in ids)


def check_budget(sampling: Sampling) -> None:
    """Raises Unprocessable if the allowed tokens do not let reasoning end."""
    budget, allowed = sampling.thinking, sampling.allowed_token_ids
    if budget and allowed and not {*budget.forced} <= {*allowed}:
        raise Unprocessable(
            "`allowed_token_ids` lack those that end the reasoning, so its budget cannot be enforced",
            param="allowed_token_ids", code="conflicting_fields",
        )  # fmt: skip

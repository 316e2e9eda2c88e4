"""Budgets for reasoning: makes the data by which a worker ends the reasoning of an output."""

from collections.abc import Sequence

from frontend.api.model_context import ModelContext
from frontend.errors import Unprocessable
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.reasoning_marks import reasoning_marks
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling, ThinkingBudget

BLANKS = ("\n", "\n\n", " ")  # texts that a model may write before it opens its reasoning


def thinking_budget(
    tokens: int | None, param: str, begins: Reasoning, max_tokens: int, context: ModelContext
) -> ThinkingBudget | None:
    """Returns how the worker limits an output's reasoning to `tokens`; None if the reasoning cannot exceed them.

    begins: the state of reasoning where the output begins
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
    """Raises Unprocessable if `allowed_token_ids` lacks the tokens that end the reasoning."""
    budget, allowed = sampling.thinking, sampling.allowed_token_ids
    if budget and allowed and not {*budget.forced} <= {*allowed}:
        raise Unprocessable(
            "`allowed_token_ids` lack those that end the reasoning, so its budget cannot be enforced",
            param="allowed_token_ids", code="conflicting_fields",
        )  # fmt: skip

"""The fields that say whether and how much to reason, and the chat template's variables that they set.

`reasoning_effort` sets an effort if the chat template knows efforts. Otherwise it turns reasoning on or off.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import Reasoning, reasoning_marks
from frontend.schema.base import MOST, RequestModel
from frontend.schema.request_fields import Count, Positive, doc
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling, ThinkingBudget

Budget = tuple[int | None, str]  # limit on reasoning tokens (None: no limit), and the name of the field that sets it
NO_BUDGET: Budget = (None, "")
MaxThinkingTokens = Annotated[
    Count | None, doc("Most tokens of reasoning; then it is ended, and the answer follows. Usage counts them as any")
]
OtherBudgetName = Annotated[
    Annotated[int, Meta(ge=-1, le=MOST)] | None, doc("Another name of `max_thinking_tokens`; -1: no limit")
]
NAMES = ("max_thinking_tokens", "thinking_budget", "thinking_token_budget")  # ours, Qwen's, vLLM's


class Thinking(RequestModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


Degree = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningEffort = Annotated[
    Degree | None,
    doc("`none` and `minimal`: do not think; others: think; the degree goes to templates that know degrees"),
]
ThinkingField = Annotated[
    Thinking | None,
    doc("Whether to think, and `budget_tokens` at most; with `display: omitted` the text is not sent"),
]


def thinking(wanted: bool | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables that turn reasoning on or off; none if the template cannot switch it."""
    switch = context.style.thinking_switch
    return {switch: wanted} if wanted is not None and switch else {}


def effort(wanted: str | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables for an OpenAI effort. If the template knows no efforts, the variables turn
    reasoning on or off."""
    if wanted is None:
        return {}
    if context.style.has_reasoning_effort:
        return {"reasoning_effort": context.style.degree(wanted)}
    return thinking(wanted not in ("none", "minimal"), context)


# Fields that ask for reasoning, and the values that ask for none.
ASKS: Mapping[str, tuple[object, ...]] = {
    "reasoning_effort": (None, "none", "minimal"), "reasoning.effort": (None, "none", "minimal"),
    "reasoning.enabled": (None, False), "reasoning.max_tokens": (None, 0), "thinking.type": (None, "disabled"),
    "think": (None, False, "none"), "output_config.effort": (None,), **dict.fromkeys(NAMES, (None, 0, -1)),
}  # fmt: skip


def without_effect(request: RequestModel, context: ModelContext) -> list[str]:
    """Returns the fields that ask for reasoning from a model that does not think, and unread template variables."""
    style, template = context.style, context.template
    variables = getattr(request, "chat_template_kwargs", None) or {}
    found = [f"chat_template_kwargs.{name}" for name in variables if not template.mentions(name)]
    if style.has_reasoning or style.thinking_switch or style.has_reasoning_effort:
        return found
    for path, none in ASKS.items():
        name, _, inner = path.partition(".")
        value = getattr(request, name, None)
        value = getattr(value, inner, None) if inner else value
        if value not in none:
            found.append(path if inner != "type" else name)
    return found


def budget_of(request: RequestModel, nested: int | None) -> Budget:
    """Returns the budget that a request sets, and the name of the field that sets it.

    nested: the value of `reasoning.max_tokens`
    """
    values = {name: getattr(request, name) for name in NAMES} | {"reasoning.max_tokens": nested}
    given = {name: value for name, value in values.items() if value is not None and value >= 0}
    if len({*given.values()}) > 1:
        first, second, *_ = given
        raise Unprocessable(f"`{first}` and `{second}` differ", param=second, code="conflicting_fields")
    return next(((value, name) for name, value in given.items()), (None, NAMES[0]))


# Budgets for reasoning: makes the data by which a worker ends the reasoning of an output.

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

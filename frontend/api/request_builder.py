"""Makes a GenerationRequest from a decoded body: the steps that all API formats share, in this order.

The prompt is shortened if the request allows it, and must fit the context. Then come the limit on new tokens, the
thinking budget, the grammar, the sampling parameters, the parsing of the output, and optional features. The module of
an optional feature is imported by the first request that asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from frontend.api.chat.structured_output_fields import StructuredOutput
from frontend.api.chat.thinking_fields import NO_BUDGET, Budget
from frontend.api.context_length import check_length
from frontend.api.model_context import ModelContext
from frontend.api.requests.likely_tokens import NO_TOPS, Places, TokenLimits, Tops, within_limits
from frontend.api.requests.request_types import MAX_STOP_IDS, GenerationFields
from frontend.api.sampling import chosen_sampling
from frontend.api.truncation import truncated
from frontend.features import NO_FEATURES, Features
from frontend.output_parser.calls.tool_syntax import specials_of
from frontend.output_parser.formats import ParserConfig, Reasoning, with_reasoning
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.request import Admission, GenerationRequest, Shown
from frontend.text.fill_in_middle import ends_of
from shared.messages import Picture, Sampling, ThinkingBudget

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A request for generated text, as its API format has read it. The prompts are passed separately."""

    fields: GenerationFields  # sampling parameters, and priority and deadline
    param: str  # the name of the request field with the prompts, for error messages
    max_tokens: int | None  # the limit on new tokens; None: up to the context's end
    ends_with_context: bool = False  # whether the end of the context may cut an answer off before `max_tokens`
    n: int = 1
    logprobs: int | None = None  # how many likeliest tokens to report beside each token; None: no log-probabilities
    tool_choice: ToolChoice | None = None  # None: the output is not parsed for tool calls and reasoning
    form: Sequence[StructuredOutput] = ()  # the constraints on the output; more than one is refused
    budget: Budget = NO_BUDGET
    features: Features = NO_FEATURES  # the features that only this API format has
    format_data: Any = None

    @property
    def functions(self) -> tuple[Function, ...]:
        """The functions that the prompt shows."""
        return self.tool_choice.shown_functions if self.tool_choice else ()


async def prepare(
    reading: Reading,
    prompts: Prompts,
    context: ModelContext,
    begins: Reasoning = Reasoning.DONE,
    pictures: tuple[Picture, ...] = (),
) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field.

    begins: the state of reasoning where the output begins; pictures: the pictures of the only prompt
    """
    fields, whole = reading.fields, prompts
    prompts = [truncated(ids, reading.max_tokens, fields, context) for ids in whole]
    most = _most_tokens(reading, prompts, context)
    budget = _budget(reading.budget, begins, most, context)
    grammar = await _grammar(reading, len(prompts), begins, context)
    tops = Tops(reading.logprobs, getattr(fields, "prompt_logprobs", None))
    if tops != NO_TOPS:
        places = Places.of(prompts, reading.n, most, bool(reading.features.echo))
        tops = within_limits(tops, fields, places, TokenLimits(context.vocab_size, context.config.max_logprobs))
    chosen = await chosen_sampling(
        fields, most, context, logprobs=tops.output, grammar=grammar, thinking=budget,
        prompt_logprobs=tops.prompt is not None or (tops.output is not None and bool(reading.features.echo)),
        prompt_top=tops.prompt or 0,
    )  # fmt: skip
    if reading.tool_choice is None and not fields.ignore_eos:
        chosen = _ended_as_a_middle(chosen, prompts, context)
    if budget is not None:
        from frontend.api.chat.thinking_budget import check_budget

        check_budget(chosen)
    return GenerationRequest(
        tuple(prompts), chosen, stops=fields.stops, n=reading.n, stream=fields.stream, model=context.model,
        parser_config=_parser_config(reading, begins, context),
        features=_features(reading, whole, prompts, most, tops.prompt, context, pictures),
        shown=_shown_with_tools(reading), admission=admission(fields), param=reading.param,
        format_data=reading.format_data,
    )  # fmt: skip


def _ended_as_a_middle(chosen: Sampling, prompts: Prompts, context: ModelContext) -> Sampling:
    """Returns the parameters with the tokens that end a middle if a prompt asks for one, as no other token may."""
    if not (ends := ends_of(prompts, context.tokenizer)):
        return chosen
    ids = tuple(dict.fromkeys([*chosen.stop_token_ids, *ends]))[:MAX_STOP_IDS]
    return msgspec.structs.replace(chosen, stop_token_ids=ids)


def _most_tokens(reading: Reading, prompts: Prompts, context: ModelContext) -> int:
    """Returns the limit on new tokens. Raises ContextLengthExceeded for a prompt that leaves no room for new tokens."""
    asked = reading.max_tokens
    needed = 1 if asked is None else min(1, asked) if reading.ends_with_context else asked
    for ids in prompts:
        check_length(reading.param, len(ids), needed, context)
    room = context.max_seq_len - max(map(len, prompts))
    if asked is None:
        return room
    return min(room, asked) if reading.ends_with_context else asked


def _budget(budget: Budget, begins: Reasoning, most: int, context: ModelContext) -> ThinkingBudget | None:
    tokens, param = budget
    if tokens is None:
        return None
    from frontend.api.chat.thinking_budget import thinking_budget

    return thinking_budget(tokens, param, begins, most, context)


async def _grammar(reading: Reading, prompts: int, begins: Reasoning, context: ModelContext) -> str:
    """Builds the grammar of the whole output; empty if the output is not constrained."""
    text_grammar, tool_choice = "", reading.tool_choice
    if reading.form:
        from frontend.api.chat.structured_output import grammar

        text_grammar = await grammar(reading.form, prompts * reading.n)
    if tool_choice is None or not (tool_choice.functions or (text_grammar and begins is not Reasoning.DONE)):
        return text_grammar
    from frontend.api.chat.tools import answer_grammar

    return await answer_grammar(tool_choice, begins, text_grammar, _specials(context), context)


async def check_forms(forms: Sequence[StructuredOutput]) -> None:
    """Checks structured output as an answer does, on routes that only count. Raises Unprocessable."""
    if forms:
        from frontend.api.chat.structured_output import grammar

        await grammar(forms)


def _parser_config(reading: Reading, begins: Reasoning, context: ModelContext) -> ParserConfig | None:
    """Returns how to parse the output; None if it is plain text."""
    choice, asks = reading.tool_choice, partial(getattr, reading.fields)
    if choice is None:
        return None
    found = context.style.parser_config(
        begins, choice.callable_functions, must_call=choice.mode is Mode.REQUIRED, specials=_specials(context)
    )
    return with_reasoning(found, asks("separate_reasoning", True), asks("stream_reasoning", True))


def _specials(context: ModelContext) -> dict[str, int]:
    """Returns the special tokens that the model's output format uses, with their ids."""
    return context.tokenizer.special_ids_of(specials_of(context.style.tool_format, context.style.tags))


def _features(
    reading: Reading, whole: Prompts, prompts: Prompts, most: int, prompt_top: int | None, context: ModelContext,
    pictures: tuple[Picture, ...],
) -> Features:  # fmt: skip
    """Returns the optional features of the request. whole: the prompts before they were shortened"""
    fields, asked = reading.fields, dict[str, Any](adapter=context.adapter) if context.adapter is not None else {}
    if reading.features.echo:  # the client's exact text is echoed only if the prompt was not shortened
        texts = zip(reading.features.echo, whole, prompts, strict=True)
        asked["echo"] = tuple([text if all is some else "" for text, all, some in texts])
    if indent := getattr(fields, "n_indent", 0):
        asked["indent"] = indent
    if getattr(fields, "continue_from", None) is not None:
        from frontend.api.chat.continuation import continued_ids

        asked["continued"] = continued_ids(fields, prompts, most, context, pictures)
    if prompt_top is not None:
        asked["prompt_logprobs"] = prompt_top
    if pictures:
        asked["pictures"] = pictures
    if fields.receipt:
        asked["receipt"] = True
    return replace(reading.features, **asked) if asked else reading.features


def _shown_with_tools(reading: Reading) -> Shown:
    made, choice = shown(reading.fields), reading.tool_choice
    if choice is None or not choice.functions or not (names := choice.custom_names):
        return made
    return replace(made, custom_tools=names)


def admission(fields: GenerationFields) -> Admission:
    return Admission(fields.cache_salt or "", fields.deadline_ms or 0, fields.priority)


def shown(fields: GenerationFields) -> Shown:
    """Returns which optional parts the response has. A field that the API format lacks counts as its default."""
    asks, options = partial(getattr, fields), fields.stream_options
    return Shown(
        usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats and options.include_usage is not False),
        timings=fields.timings,
        telemetry=asks("telemetry", None),
        ids=asks("return_token_ids", False),
        tokens_as_ids=asks("return_tokens_as_token_ids", False),
        stop=asks("include_stop_str_in_output", False) or asks("no_stop_trim", False),
        specials=not asks("skip_special_tokens", True),
        reasoning=asks("include_reasoning", True) and not getattr(asks("reasoning", None), "exclude", False),
    )

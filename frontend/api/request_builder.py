"""Makes a GenerationRequest from a decoded body: the steps that all API formats share, in this order.

The prompt is shortened if the request allows it, and must fit the context. Then come the limit on new tokens, the
thinking budget, the grammar, the sampling parameters, the parsing of the output, and optional features. The module of
an optional feature is imported by the first request that asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import msgspec

from frontend.api.receipts import continued_ids
from frontend.chat.reasoning import NO_BUDGET, Budget
from frontend.errors import Unprocessable
from frontend.model_context import ModelContext, check_ids, check_length, truncated
from frontend.output_parser.model_format import Function, Mode, ParserConfig, Reasoning, ToolChoice, with_reasoning
from frontend.output_parser.tool_syntax import specials_of
from frontend.request import NO_FEATURES, Admission, Features, GenerationRequest, ResponseOptions, report_lowered
from frontend.schema.base import SMALLEST
from frontend.schema.request_fields import MAX_STOP_IDS, UNLIMITED, GenerationFields
from frontend.structured_output.fields import StructuredOutput
from frontend.text.fill_in_middle import ends_of
from shared.messages import PromptImage, Sampling, ThinkingBudget

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request for generated text, as its API format has read it. The prompts are passed separately."""

    fields: GenerationFields  # sampling parameters, and priority and deadline
    param: str  # the name of the request field with the prompts, for error messages
    max_tokens: int | None  # the limit on new tokens; None: that of the model's name; UNLIMITED: the context's end
    limit_param: str = "max_tokens"  # the name of the request field with that limit
    ends_with_context: bool = False  # whether a limit beyond the context's end is cut to it, unless the server refuses
    n: int = 1
    logprobs: int | None = None  # how many likeliest tokens to report for each position; None: no log-probabilities
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
    parsed: ParsedRequest,
    prompts: Prompts,
    context: ModelContext,
    begins: Reasoning = Reasoning.DONE,
    images: tuple[PromptImage, ...] = (),
) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field.

    begins: the state of reasoning where the output begins; images: the images of the only prompt
    """
    fields, full_prompts = parsed.fields, prompts
    prompts = [truncated(ids, parsed.max_tokens, fields, context) for ids in full_prompts]
    max_new_tokens = _most_tokens(parsed, prompts, context)
    budget = _budget(parsed.budget, begins, max_new_tokens, context)
    grammar = await _grammar(parsed, len(prompts), begins, context)
    tops = Tops(parsed.logprobs, getattr(fields, "prompt_logprobs", None))
    if tops != NO_TOPS:
        places = Places.of(prompts, parsed.n, max_new_tokens, bool(parsed.features.echo))
        tops = within_limits(tops, fields, places, TokenLimits(context.vocab_size, context.config.max_logprobs))
    chosen = await chosen_sampling(
        fields, max_new_tokens, context, logprobs=tops.output, grammar=grammar, thinking=budget,
        prompt_logprobs=tops.prompt is not None or (tops.output is not None and bool(parsed.features.echo)),
        prompt_top=tops.prompt or 0,
    )  # fmt: skip
    if parsed.tool_choice is None and not fields.ignore_eos:
        chosen = _with_middle_ends(chosen, prompts, context)
    if budget is not None:
        from frontend.chat.reasoning import check_budget

        check_budget(chosen)
    return GenerationRequest(
        tuple(prompts), chosen, stops=fields.stops or context.stops, n=parsed.n, stream=fields.stream,
        model=context.model,
        parser_config=_parser_config(parsed, begins, context),
        features=_features(parsed, full_prompts, prompts, max_new_tokens, tops.prompt, context, images),
        shown=_shown_with_tools(parsed), admission=admission(fields), param=parsed.param,
        format_data=parsed.format_data,
    )  # fmt: skip


def _with_middle_ends(chosen: Sampling, prompts: Prompts, context: ModelContext) -> Sampling:
    """Returns the parameters with further stop tokens if a prompt asks for fill-in-the-middle.

    These tokens end a middle, but are not among the model's eos tokens.
    """
    if not (ends := ends_of(prompts, context.tokenizer)):
        return chosen
    ids = tuple(dict.fromkeys([*chosen.stop_token_ids, *ends]))[:MAX_STOP_IDS]
    return msgspec.structs.replace(chosen, stop_token_ids=ids)


def _most_tokens(parsed: ParsedRequest, prompts: Prompts, context: ModelContext) -> int:
    """Returns the limit on new tokens, at most what the longest prompt leaves of the context.

    Raises ContextLengthExceeded for a prompt that leaves no room, and for a limit beyond the context where such a limit
    is refused. Where it is cut, the response's header `X-Sluice-Lowered-Fields` names it.
    """
    asked = None if parsed.max_tokens == UNLIMITED else parsed.max_tokens
    policy = context.config.beyond_context
    cuts = parsed.ends_with_context if policy == "auto" else policy == "cut"
    needed = 1 if asked is None else min(1, asked) if cuts else asked
    for ids in prompts:
        check_length(parsed.param, len(ids), needed, context)
    room = context.max_seq_len - max(map(len, prompts))
    if asked is None:
        usual = context.most_new if parsed.max_tokens is None else None
        return room if usual is None else min(room, usual)
    if asked > room:
        report_lowered(parsed.limit_param, room)
    return min(room, asked)


def _budget(budget: Budget, begins: Reasoning, max_new_tokens: int, context: ModelContext) -> ThinkingBudget | None:
    tokens, param = budget
    if tokens is None:
        return None
    from frontend.chat.reasoning import thinking_budget

    return thinking_budget(tokens, param, begins, max_new_tokens, context)


async def _grammar(parsed: ParsedRequest, prompts: int, begins: Reasoning, context: ModelContext) -> str:
    """Builds the grammar of the whole output; empty if the output is not constrained."""
    text_grammar, tool_choice = "", parsed.tool_choice
    if parsed.form:
        from frontend.structured_output.constraints import grammar

        text_grammar = await grammar(parsed.form, prompts * parsed.n)
    if tool_choice is None or not (tool_choice.functions or (text_grammar and begins is not Reasoning.DONE)):
        return text_grammar
    from frontend.structured_output.tool_grammar import answer_grammar

    return await answer_grammar(tool_choice, begins, text_grammar, _specials(context), context)


async def check_forms(forms: Sequence[StructuredOutput]) -> None:
    """Checks structured output as an answer does, on routes that only count. Raises Unprocessable."""
    if forms:
        from frontend.structured_output.constraints import grammar

        await grammar(forms)


def _parser_config(parsed: ParsedRequest, begins: Reasoning, context: ModelContext) -> ParserConfig | None:
    """Returns how to parse the output; None if it is plain text."""
    choice, asks = parsed.tool_choice, partial(getattr, parsed.fields)
    if choice is None:
        return None
    found = context.style.parser_config(
        begins, choice.callable_functions, must_call=choice.mode is Mode.REQUIRED,
        may_drift=choice.mode is Mode.AUTO and not parsed.form, specials=_specials(context),
    )  # fmt: skip
    return with_reasoning(found, asks("separate_reasoning", True), asks("stream_reasoning", True))


def _specials(context: ModelContext) -> dict[str, int]:
    """Returns the special tokens that the model's output format uses, with their ids."""
    return context.tokenizer.special_ids_of(specials_of(context.style.tool_format, context.style.tags))


def _features(
    parsed: ParsedRequest, full_prompts: Prompts, prompts: Prompts, max_new_tokens: int, prompt_top: int | None,
    context: ModelContext, images: tuple[PromptImage, ...],
) -> Features:  # fmt: skip
    """Returns the optional features of the request. full_prompts: the prompts before they were shortened"""
    fields, asked = parsed.fields, dict[str, Any](adapter=context.adapter) if context.adapter is not None else {}
    if parsed.features.echo:  # the client's exact text is echoed only if the prompt was not shortened
        texts = zip(parsed.features.echo, full_prompts, prompts, strict=True)
        asked["echo"] = tuple([text if all is some else "" for text, all, some in texts])
    if indent := getattr(fields, "n_indent", 0):
        asked["indent"] = indent
    if getattr(fields, "continue_from", None) is not None:
        asked["continued"] = continued_ids(fields, prompts, max_new_tokens, context, images)
    if prompt_top is not None:
        asked["prompt_logprobs"] = prompt_top
    if images:
        asked["images"] = images
    if fields.receipt:
        asked["receipt"] = True
    return replace(parsed.features, **asked) if asked else parsed.features


def _shown_with_tools(parsed: ParsedRequest) -> ResponseOptions:
    made, choice = shown(parsed.fields), parsed.tool_choice
    if choice is None or not choice.functions or not (names := choice.custom_names):
        return made
    return replace(made, custom_tools=names)


def admission(fields: GenerationFields) -> Admission:
    if fields.cache_salt:
        return Admission(fields.cache_salt, fields.deadline_ms or 0, fields.priority)
    return _admission("", fields.deadline_ms or 0, fields.priority)


_admission = lru_cache(maxsize=64)(Admission)  # most requests ask for the same


def shown(fields: GenerationFields) -> ResponseOptions:
    """Returns which optional parts the response has. A field that the API format lacks counts as its default."""
    asks, options = partial(getattr, fields), fields.stream_options
    return _shown(
        bool(options and options.include_usage),
        bool(options and options.continuous_usage_stats and options.include_usage is not False),
        fields.timings,
        asks("telemetry", None),
        asks("return_token_ids", False),
        asks("return_tokens_as_token_ids", False),
        asks("include_stop_str_in_output", False) or asks("no_stop_trim", False),
        not asks("skip_special_tokens", True),
        asks("include_reasoning", True) and not getattr(asks("reasoning", None), "exclude", False),
    )


_shown = lru_cache(maxsize=256)(ResponseOptions)  # most requests ask for the same


# Turns the sampling fields of a request, which have OpenAI's names, into the message to a worker.

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip


async def chosen_sampling(request: GenerationFields, max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """Does the same as `sampling`, but also reads a request that sets its own chain of samplers."""
    chosen = sampling(request, max_tokens, context, **more)
    if not request.wants_chain:
        return chosen
    from frontend.chat.samplers import with_chain

    return await with_chain(chosen, request, context)


def sampling(request: GenerationFields, max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """Makes the worker's Sampling. A missing field gets the checkpoint's recommendation, or else Sampling's default.

    more: values of fields that only some API formats have
    """
    given = {name: value for name in SAMPLING if (value := getattr(request, name, None)) is not None}
    if (factor := getattr(request, "repeat_penalty", None)) is not None:
        given.setdefault("repetition_penalty", factor)
    values = {name: _for_worker(name, value, context) for name, value in {**context.recommended, **given}.items()}
    if (least := values.get("min_tokens", 0)) > max_tokens:
        raise Unprocessable(
            f"`min_tokens` is {least}, more than the {max_tokens} tokens that the answer may have", param="min_tokens",
            code="out_of_range",
        )  # fmt: skip
    return Sampling(max_tokens=max_tokens, **values, **more)


def _for_worker(name: str, value: Any, context: ModelContext) -> Any:
    match name:
        case "seed":
            return value % (1 << 64)  # reinterprets a signed 64-bit integer as unsigned
        case "top_p":
            return max(SMALLEST, float(value))  # the likeliest token has more than any positive share
        case "top_k":
            # 0, -1 and numbers above the vocabulary's size turn top_k off. The message cannot hold very large numbers.
            return min(value, context.vocab_size) if value > 0 else 0
        case "stop_token_ids":
            check_ids(name, value, context.vocab_size)
            return tuple(value)
        case "allowed_token_ids":
            if not value:
                raise Unprocessable(f"`{name}` is empty, so no token is allowed", param=name, code="out_of_range")
            check_ids(name, value, context.vocab_size)
            return tuple(dict.fromkeys(value))
        case "bad_words":
            return _bad_words(value, context)
        case "logit_bias":
            check_ids(name, list(value), context.vocab_size)
            if any(0 < abs(bias) < SMALLEST for bias in set(value.values())):
                return tuple((token, _float32(bias)) for token, bias in value.items())
            return tuple(value.items())
    return _float32(value) if type(value) is float else value


def _bad_words(words: list[str], context: ModelContext) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word, both at the beginning of a text and after a space. Raises Unprocessable."""
    bare = [word.lstrip() or word for word in words]
    encoded = context.tokenizer.encode_now([*bare, *[" " + word for word in bare]], False)
    for place, ids in enumerate(encoded):
        check_ids(f"bad_words[{place % len(words)}]", ids, context.vocab_size)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def _float32(value: float) -> float:
    """Returns the value, or 0 if it is below the normal range of the worker's float32."""
    return value if abs(value) >= SMALLEST else 0.0


# Limits how many of the likeliest tokens a request may have reported: for each position, and for all together.
#
# The limit of a position is `--max-logprobs`. In a request, -1 stands for the whole vocabulary.

FEW_TOPS = 20  # the most per position in OpenAI's API
# Log-probabilities of an answer in all. A worker needs 8 bytes for each, a frontend that writes one answer 40 to 90.
MOST = 1 << 20  # of prompts, and of answers with more than FEW_TOPS per position
MOST_OF_FEW = 1 << 22  # of answers with up to FEW_TOPS per position, unless they are streamed
MOST_REPEATED = 1 << 16  # in one event of a stream: an echoed prompt, or SGLang's answer so far


class Tops(NamedTuple):
    """How many of the likeliest tokens are reported for each position; None: not even the token itself is scored."""

    output: int | None
    prompt: int | None


NO_TOPS = Tops(None, None)


class TokenLimits(NamedTuple):
    vocab_size: int
    max_logprobs: int  # the setting; -1: no limit


class Places(NamedTuple):
    """The number of positions in all sequences of a request whose tokens are scored."""

    output: int
    prompt: int
    echoed: bool = False  # whether the prompt's positions report as many tokens as the output's, because of `echo`

    @classmethod
    def of(cls, prompts: Sequence[list[int]], n: int, most: int, echoed: bool) -> Self:
        """Counts the positions if each prompt gets `n` answers, which have up to `most` tokens."""
        return cls(len(prompts) * n * most, n * sum(map(len, prompts)), echoed)


def within_limits(asked: Tops, fields: GenerationFields, places: Places, limits: TokenLimits) -> Tops:
    """Returns the numbers that a request asks for, with the vocabulary's size in place of -1.

    Raises Unprocessable for a number above `--max-logprobs`, for a total above MOST, and for log-probabilities of a
    prompt in a stream.
    """
    if asked.prompt is not None and fields.stream:
        raise Unprocessable(
            "`prompt_logprobs` are not available in a stream", param="prompt_logprobs", code="conflicting_fields"
        )
    name = "top_logprobs" if getattr(fields, "top_logprobs", None) else "logprobs"
    output = None if asked.output is None else allowed(asked.output, name, limits)
    prompt = None if asked.prompt is None else allowed(asked.prompt, "prompt_logprobs", limits)
    if output is not None:
        echoed = places.prompt if places.echoed and output > FEW_TOPS else 0
        check_total(output, places.output + echoed, name, fields.stream)
    if output is not None and places.echoed:
        _check(output, places.prompt, name, MOST_REPEATED if fields.stream else MOST)
    if prompt is not None:
        _check(prompt, places.prompt, "prompt_logprobs", MOST)
    return Tops(output, prompt)


def allowed(asked: int, name: str, limits: TokenLimits) -> int:
    """Returns `asked`, but at most the vocabulary's size. -1 stands for the vocabulary's size.

    Raises Unprocessable if the number is above `--max-logprobs`.
    """
    wanted = limits.vocab_size if asked < 0 else asked
    if wanted > limits.max_logprobs >= 0:
        whole = f" (the whole vocabulary, {wanted} tokens)" if asked < 0 else ""
        raise Unprocessable(
            f"`{name}` must be at most {limits.max_logprobs}, the server's `--max-logprobs`, got {asked}{whole}",
            param=name, code="out_of_range",
        )  # fmt: skip
    return min(wanted, limits.vocab_size)


def check_total(top: int, places: int, name: str, streams: bool) -> None:
    """Raises Unprocessable if `top` likeliest tokens for each of `places` positions of answers are too many to
    report."""
    if top > FEW_TOPS:
        _check(top, places, name, MOST)
    elif not streams:
        _check(top, places, name, MOST_OF_FEW)


def check_repeated(top: int, places: int, name: str) -> None:
    """Raises Unprocessable for a stream whose events would repeat too many log-probabilities."""
    _check(top, places, name, MOST_REPEATED)


def _check(top: int, places: int, name: str, most: int) -> None:
    entries = places * max(1, top)
    if entries > most:
        raise Unprocessable(
            f"`{name}` of {top} in {places} places makes {entries} log-probabilities; a request has at most {most} "
            f"in all: lower `{name}` or the most tokens of the answer, or send fewer or shorter prompts",
            param=name, code="out_of_range",
        )  # fmt: skip

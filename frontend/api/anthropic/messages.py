"""Anthropic's messages: https://platform.claude.com/docs/en/api/messages

A stream is message_start, content_block_start, ping, content_block_delta…, content_block_stop, message_delta,
message_stop. Sampling fields that Anthropic lacks (`seed`, `stop_token_ids`, …), `timings` and the seed that
reproduces an answer are extensions.
"""

from itertools import chain
from typing import Any

from frontend.api import structured_output
from frontend.api.anthropic import envelope as frame
from frontend.api.anthropic.envelope import PREFIX, error, stream_error
from frontend.api.anthropic.messages_input import later_systems_as_users, marked, message, text
from frontend.api.anthropic.messages_output import ParsedWriter, parsed_blocks
from frontend.api.chat_prompt import MAX_MESSAGES, Prompt, merge_same_role, prompt, turn
from frontend.api.common import (
    MAX_STOPS,
    OPENAI,
    QUEUING,
    SAMPLING,
    AsyncDeltas,
    ModelContext,
    ResponseContext,
    Totals,
    check_length,
    check_model,
    sampling,
)
from frontend.api.fields import (
    Field,
    Table,
    anything,
    each,
    exactly,
    integer,
    list_of,
    only,
    out_of_range,
    read,
    record,
    refused,
    some_text,
)
from frontend.api.tools import ANTHROPIC_TOOLS, answer_form, offer, thinking
from frontend.errors import SluiceError
from frontend.output_parser.parsed import ParsedOutput
from frontend.request import Delta, GenerationRequest
from frontend.text.chat_template import TemplateError

__all__ = [
    "COUNTED",
    "FIELDS",
    "NAME",
    "PREFIX",
    "complete",
    "count_tokens",
    "error",
    "parse",
    "stream_error",
    "stream_writer",
]

NAME = "messages"

KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}

COUNTED: Table = {
    "model": OPENAI["model"],
    "messages": Field(each(message, MAX_MESSAGES), required=True),
    "system": Field(text),
    "chat_template_kwargs": Field(exactly(dict), {}),
    **ANTHROPIC_TOOLS,
    "cache_control": Field(anything),
    "output_config": Field(record(structured_output.OUTPUT_CONFIG), {}),
    "mcp_servers": Field(only([])),
    "context_management": Field(only({"edits": []}, {"edits": [KEEP_THOUGHTS]})),
}

FIELDS: Table = {
    **COUNTED,
    **QUEUING,
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed")},
    **{name: SAMPLING[name] for name in ("min_tokens", "ignore_eos", "stop_token_ids")},
    **{name: OPENAI[name] for name in ("stream", "stream_options", "timings", "cache_salt")},
    **{name: OPENAI[name] for name in ("user", "metadata", "store", "service_tier")},
    "max_tokens": Field(integer(1), required=True),
    "stop_sequences": Field(list_of(some_text, MAX_STOPS), ()),
    "thread": Field(refused),
    "container": Field(refused),
    "inference_geo": Field(anything),
    "diagnostics": Field(anything),
    "speed": Field(only("standard")),
}


async def parse(body: dict[str, Any], context: ModelContext) -> GenerationRequest:
    """Raises BadRequest or Unprocessable, naming the field."""
    values = read(FIELDS, body)
    check_model(values["model"], context)
    wanted, several = values["tool_choice"]
    offered = offer(values["tools"], wanted, several, context)
    ids, begins = await _prompt(values, context)
    grammar = await structured_output.grammar(structured_output.anthropic(values))
    grammar, parser_config = await answer_form(offered, begins, grammar, context)
    chosen = sampling(values, values["max_tokens"], context, grammar=grammar)
    check_length("messages", len(ids), chosen.max_tokens, context)
    return GenerationRequest(
        prompts=(ids,), sampling=chosen, stops=values["stop_sequences"], stream=values["stream"],
        timings=values["timings"], model=context.model, parser_config=parser_config,
        priority=values["priority"], deadline_ms=values["deadline_ms"], cache_salt=values["cache_salt"],
        continuous_usage=values["stream_options"].get("continuous_usage_stats", False),
        format_data={"thinking": (values["thinking"] or {}).get("display"), frame.CACHES: marked(body)},
    )  # fmt: skip


async def count_tokens(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """What the same body, sent as a message, would have as its `input_tokens`."""
    values = read(COUNTED, body)
    check_model(values["model"], context)
    wanted, several = values["tool_choice"]
    offer(values["tools"], wanted, several, context)
    return {"input_tokens": len((await _prompt(values, context)).ids)}


async def _prompt(values: dict[str, Any], context: ModelContext) -> Prompt:
    """An answer goes on where a last message of the assistant's stops. Who does not ask for thoughts gets none.

    Where a template takes a system's words at the beginning only, later ones are a user's.
    """
    said = list(chain.from_iterable(values["messages"]))
    if said[0]["role"] == "system":
        raise out_of_range("messages[0].role", "system", "user or assistant: what stands before is `system`")
    system = [turn("system", values["system"])] if values["system"] else []
    turns = merge_same_role([*system, *said])
    resume = turns[-1]["role"] == "assistant"
    kwargs = _thinking(values, context) | values["chat_template_kwargs"]
    rest = kwargs, values["tools"], not resume, resume
    try:
        return await prompt(turns, context, *rest)
    except TemplateError:
        plain = merge_same_role(later_systems_as_users(turns))
        if plain == turns:
            raise
        return await prompt(plain, context, *rest)


def _thinking(values: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """What the template is told; `adaptive` leaves it to the model, which may be one that never thinks."""
    style = context.style
    kind = (values["thinking"] or {"type": "disabled"})["type"]
    asked = kind == "enabled" or (kind == "adaptive" and (style.has_reasoning or style.has_enable_thinking))
    degree = values["output_config"].get("effort")
    told = {"reasoning_effort": degree} if degree is not None and style.has_reasoning_effort else {}
    return told | thinking(asked, "thinking", context)


def stream_writer(context: ResponseContext) -> "TextWriter | ParsedWriter":
    parser_config = context.request.parser_config
    return TextWriter(context) if parser_config is None else ParsedWriter(context, parser_config)


class TextWriter:
    """Writes one response that is text only, in one block."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._opening = frame.start(context) + frame.BLOCK_START + frame.PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            data += frame.text_delta(delta, running_totals)
            if delta.finish is not None:
                data += frame.BLOCK_STOP + frame.end(self._context, delta, self._totals)
        return data

    def end(self) -> bytes:
        return b""


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """The answer in one piece."""
    totals = Totals(context.request)
    texts: list[str] = []
    last: Delta | None = None
    async for deltas in arriving:
        for last in deltas:
            totals.add(last)
            texts += last.texts
    if last is None or last.finish is None:
        raise SluiceError("the message has no end")
    text = "".join(texts)
    if context.request.parser_config is None:
        return frame.answer(context, [{"type": "text", "text": text}], last, totals)
    said = ParsedOutput.parse(text, context.request.parser_config)
    return frame.answer(context, parsed_blocks(said, context), last, totals, said.parser.called)

"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses

A stream is response.created, response.in_progress, the steps of each item (`output`), and response.completed or, where
the answer was cut off, response.incomplete. Nothing is stored: a request brings all of its history.
"""

import time
from collections.abc import Mapping
from typing import Any

from frontend.api import structured_output
from frontend.api.chat_prompt import Prompt, merge_same_role, prompt, turn
from frontend.api.common import (
    MAX_LOGPROBS,
    OPENAI,
    AsyncDeltas,
    ModelContext,
    ResponseContext,
    Totals,
    check_length,
    check_model,
    openai_error,
    sampling,
    to_json,
)
from frontend.api.fields import (
    Field,
    Table,
    anything,
    choice,
    exactly,
    flags,
    integer,
    list_of,
    only,
    read,
    record,
    refused,
    some_text,
)
from frontend.api.openai.chat_input import OPENAI_CHAT
from frontend.api.openai.completions import error
from frontend.api.openai.responses_input import given
from frontend.api.openai.responses_output import BEGUN, CUT, DONE, Output, Step, numbered, step
from frontend.api.tools import FLAT_TOOLS, answer_form, degree, effort, offer
from frontend.errors import SluiceError
from frontend.request import Delta, Finish, GenerationRequest
from shared.messages import Sampling

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

NAME, PREFIX = "responses", "resp"
SCORES = "message.output_text.logprobs"
INCLUDED = (
    SCORES, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
OPENING = ("response.created", "response.in_progress")
_summary = choice("auto", "concise", "detailed")

COUNTED: Table = {
    "model": Field(some_text),  # none given: the one that is served
    "input": Field(given, required=True),
    "instructions": Field(exactly(str), ""),
    "chat_template_kwargs": OPENAI_CHAT["chat_template_kwargs"],
    **FLAT_TOOLS,
    "reasoning": Field(
        record({
            "effort": Field(degree),
            "summary": Field(_summary),
            "generate_summary": Field(_summary),
            "context": Field(only("auto")),
            "mode": Field(only("standard")),
        }),
        {},
    ),
    "text": Field(record(structured_output.TEXT), {}),
    "truncation": Field(only("disabled")),
    "previous_response_id": Field(refused),
    "conversation": Field(refused),
}  # fmt: skip

FIELDS: Table = {
    **{name: field for name, field in OPENAI.items() if name != "n"},
    **COUNTED,
    "max_output_tokens": Field(integer(1)),
    "include": Field(list_of(choice(*INCLUDED), len(INCLUDED)), ()),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "stream_options": Field(flags("include_obfuscation", "include_usage"), {}),
    **structured_output.GUIDED,
    "background": Field(only(False)),
    "max_tool_calls": Field(integer(1)),
    "client_metadata": Field(anything),
    "prompt": Field(refused),
    "context_management": Field(only([])),
    "moderation": Field(refused),
}


async def parse(body: dict[str, Any], context: ModelContext) -> GenerationRequest:
    """Raises BadRequest or Unprocessable, naming the field."""
    values = read(FIELDS, body)
    check_model(values["model"], context)
    logprobs, most = _logprobs_asked(values), values["max_output_tokens"]
    offered = offer(values["tools"], values["tool_choice"], values["parallel_tool_calls"], context)
    ids, begins = await _prompt(values, context)
    check_length("input", len(ids), most or 1, context)
    grammar = await structured_output.grammar(structured_output.responses(values))
    grammar, parser_config = await answer_form(offered, begins, grammar, context)
    chosen = sampling(values, most or context.max_seq_len - len(ids), context, logprobs=logprobs, grammar=grammar)
    return GenerationRequest(
        prompts=(ids,), sampling=chosen, stops=values["stop"], stream=values["stream"],
        timings=values["timings"], model=context.model, parser_config=parser_config,
        priority=values["priority"], deadline_ms=values["deadline_ms"], cache_salt=values["cache_salt"],
        format_data=_echoed(body, values, chosen),
    )  # fmt: skip


def _logprobs_asked(values: Mapping[str, Any]) -> int | None:
    """Who names a number of rivals wants scores, and need not say so twice."""
    asked = SCORES in values["include"] or values["top_logprobs"]
    return (values["top_logprobs"] or 0) if asked else None


async def _prompt(values: Mapping[str, Any], context: ModelContext) -> Prompt:
    instructions = [turn("system", values["instructions"])] if values["instructions"] else []
    turns = merge_same_role([*instructions, *values["input"]])
    wanted = effort(values["reasoning"].get("effort"), "reasoning.effort", context)
    return await prompt(turns, context, wanted | values["chat_template_kwargs"], values["tools"], param="input")


async def count_tokens(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """What the same body, sent as a request, would have as its `input_tokens`."""
    values = read(COUNTED, body)
    check_model(values["model"], context)
    offer(values["tools"], values["tool_choice"], values["parallel_tool_calls"], context)
    return {"object": "response.input_tokens", "input_tokens": len((await _prompt(values, context)).ids)}


def _echoed(body: Mapping[str, Any], values: Mapping[str, Any], chosen: Sampling) -> dict[str, Any]:
    """What a response says about its request."""
    tools = [{"type": "function", **one.definition["function"], "strict": one.strict} for one in values["tools"]]
    return {
        "instructions": body.get("instructions"), "max_output_tokens": values["max_output_tokens"],
        "max_tool_calls": values["max_tool_calls"], "metadata": values["metadata"] or {},
        "parallel_tool_calls": values["parallel_tool_calls"],
        "reasoning": {"effort": values["reasoning"].get("effort"), "summary": None},
        "temperature": chosen.temperature, "text": {"format": _format(body)},
        "tool_choice": body.get("tool_choice") or "auto", "tools": tools,
        "top_logprobs": values["top_logprobs"] or 0, "top_p": chosen.top_p, "truncation": "disabled",
        "user": values["user"], "service_tier": "default", "store": False, "background": False,
        "previous_response_id": None,
    }  # fmt: skip


def _format(body: Mapping[str, Any]) -> Any:
    return (body.get("text") or {}).get("format") or {"type": "text"}


def stream_writer(context: ResponseContext) -> "ResponseWriter":
    return ResponseWriter(context)


class ResponseWriter:
    """Writes one response as numbered events."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._output = Output(context)
        self._begun = False

    def write(self, deltas: list[Delta]) -> bytes:
        steps: list[Step] = []
        if deltas and not self._begun:
            self._begun = True
            steps += [step(kind, response=_response(self._context, BEGUN)) for kind in OPENING]
        for delta in deltas:
            self._totals.add(delta)
            steps += self._output.add(delta)
            if delta.finish is not None:
                ended = _ended(self._context, delta, self._totals, self._output)
                steps.append(step(f"response.{ended['status']}", response=ended))
        return numbered(steps, self._context.event_numbers)

    def end(self) -> bytes:
        return b""


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """The answer in one piece."""
    totals, output = Totals(context.request), Output(context)
    last: Delta | None = None
    async for deltas in arriving:
        for last in deltas:
            totals.add(last)
            output.add(last)
    if last is None or last.finish is None:
        raise SluiceError("the response has no end")
    return to_json(_ended(context, last, totals, output))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """The end of a stream that went wrong, as OpenAI's: its SDKs raise on the first, others know the second."""
    failed = _response(context, "failed") | {"error": {"code": "server_error", "message": exc.message}}
    said = step("error", code=exc.code, message=exc.message, param=exc.param, error=openai_error(exc))
    return numbered([said, step("response.failed", response=failed)], context.event_numbers)


def _response(context: ResponseContext, status: str) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}_{context.nonce}", "object": "response", "created_at": context.created, "status": status,
        "completed_at": None, "error": None, "incomplete_details": None, "model": context.request.model, "output": [],
        "usage": None, **context.request.format_data,
    }  # fmt: skip


def _ended(context: ResponseContext, delta: Delta, totals: Totals, output: Output) -> dict[str, Any]:
    """The whole response; `delta` is its last."""
    cut = delta.finish is Finish.LENGTH
    end = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
    told = {"output": output.items, "usage": _usage(totals, output), "stop_reason": delta.stop, "seed": delta.seed}
    timings = {"timings": totals.timings} if context.request.timings else {}
    return _response(context, CUT if cut else DONE) | end | told | timings


def _usage(totals: Totals, output: Output) -> dict[str, Any]:
    usage = totals.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.thought},
        "total_tokens": usage.total_tokens,
    }  # fmt: skip

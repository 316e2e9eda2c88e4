"""OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses

A stream has response.created, response.in_progress, the events of each output item (`Output`), and response.completed
or, if the answer was cut off, response.incomplete. Nothing is stored, so a request contains its whole conversation.
"""

import time
from dataclasses import replace
from typing import Any

from frontend.api.chat import structured_output_fields
from frontend.api.chat.structured_output_fields import TextFormat
from frontend.api.chat.thinking_fields import budget_of
from frontend.api.chat.tool_fields import checked, openai_tool_choice
from frontend.api.model_context import ModelContext, check_model
from frontend.api.openai import responses_types as types
from frontend.api.openai.completions import error, error_body
from frontend.api.openai.completions_input import check_stream_options
from frontend.api.openai.responses_input import SCORES, ResponseCountRequest, ResponseRequest, response_prompt
from frontend.api.openai.responses_output import COMPLETED, INCOMPLETE, Output, event
from frontend.api.openai.token_details import telemetry_events
from frontend.api.prepare import Reading, check_forms, prepare
from frontend.api.receipts.receipt import receipt_of
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.api.totals import Totals
from frontend.api.truncation import before_truncation
from frontend.errors import SluiceError, api_status
from frontend.output_parser.tool_choice import Function, ToolChoice
from frontend.request import Delta, Finish, GenerationRequest
from frontend.server.sse import SERVER_SENT_EVENTS
from shared.messages import Sampling

__all__ = [
    "FRAMING",
    "NAME",
    "PREFIX",
    "REQUEST",
    "complete",
    "count_tokens",
    "error",
    "parse",
    "status",
    "stream_error",
    "stream_writer",
]

NAME, PREFIX = "responses", "resp"
FRAMING = SERVER_SENT_EVENTS
REQUEST = ResponseRequest
status = api_status
OPENING = (types.Created, types.InProgress)


async def parse(request: ResponseRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    check_stream_options(request, request.stream)
    choice = _tool_choice(request, context)
    reading = Reading(
        request, "input", request.most_tokens, logprobs=_logprobs_asked(request),
        tool_choice=choice,
        form=structured_output_fields.openai(request, _format(request), "text.format"),
        budget=budget_of(request, request.reasoning.max_tokens if request.reasoning else None),
    )  # fmt: skip
    prompt = await response_prompt(
        request, reading.functions, before_truncation(request.truncate_prompt_tokens, context)
    )
    made = await prepare(reading, [prompt.ids], context, prompt.begins, prompt.pictures)
    return replace(made, format_data=_echoed(request, choice.functions, made.sampling))


def _tool_choice(request: ResponseRequest | ResponseCountRequest, context: ModelContext) -> ToolChoice:
    return openai_tool_choice(request.tools, request.tool_choice, request.parallel_tool_calls, context)


def _logprobs_asked(request: ResponseRequest) -> int | None:
    """Returns how many likeliest tokens to report; None: no log-probabilities. `top_logprobs` alone asks for them."""
    asked = SCORES in (request.include or ()) or request.top_logprobs
    return (request.top_logprobs or 0) if asked else None


def _format(request: ResponseRequest | ResponseCountRequest) -> TextFormat | None:
    return request.text.format if request.text else None


async def count_tokens(request: ResponseCountRequest, context: ModelContext) -> types.InputTokens:
    """Returns the number of input tokens that a request with this body would have."""
    check_model(request.model, context)
    known = await checked(_tool_choice(request, context).shown_functions)
    await check_forms([*structured_output_fields.of_format(_format(request), "text.format")])
    ids = (await response_prompt(request, known, context.unlimited)).ids
    return types.InputTokens(input_tokens=len(ids))


def _echoed(request: ResponseRequest, known: tuple[Function, ...], chosen: Sampling) -> dict[str, Any]:
    """Returns the fields of a response that repeat fields of its request."""
    tools = [_echoed_tool(one) for one in known]
    return {
        "instructions": request.instructions, "max_output_tokens": request.most_tokens,
        "max_tool_calls": request.max_tool_calls, "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": types.ReasoningSettings(effort=request.reasoning.effort if request.reasoning else None),
        "temperature": chosen.temperature,
        "text": types.TextSettings(format=_format(request) or {"type": "text"}),
        "tool_choice": request.tool_choice or "auto", "tools": tools,
        "top_logprobs": request.top_logprobs or 0, "top_p": chosen.top_p,
        "user": request.user,
    }  # fmt: skip


def _echoed_tool(tool: Function) -> dict[str, Any]:
    shown = tool.definition["function"]
    if tool.custom is None:
        return {"type": "function", **shown, "strict": tool.strict}
    form = tool.custom.format or {"type": "text"}
    return {"type": "custom", "name": tool.name, "description": shown["description"], "format": form}


def stream_writer(context: ResponseContext) -> "ResponseWriter":
    return ResponseWriter(context)


class ResponseWriter:
    """Writes one response as a stream of numbered events."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._output = Output(context)
        self._begun = False
        self._telemetry = telemetry_events(context, len(OPENING))

    def write(self, deltas: list[Delta]) -> bytes:
        events: list[bytes] = []
        if deltas and not self._begun:
            self._begun = True
            events += [event(self._context, kind, response=_started(self._context)) for kind in OPENING]
        for delta in deltas:
            self._totals.add(delta)
            events += self._output.add(delta)
            if delta.finish is not None:
                kind = types.Incomplete if delta.finish is Finish.LENGTH else types.Completed
                response = _finished(self._context, delta, self._totals, self._output)
                events.append(event(self._context, kind, response=response))
        data = b"".join(events)
        return data if self._telemetry is None else self._telemetry.added(data, deltas)

    def end(self) -> bytes:
        return b""


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    totals, output = Totals(context.request), Output(context)
    last: Delta | None = None
    async for deltas in arriving:
        for last in deltas:
            totals.add(last)
            output.add(last)
    if last is None or last.finish is None:
        raise SluiceError("the response has no end")
    return to_json(_finished(context, last, totals, output))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the two events that end a failed stream. OpenAI's SDKs raise an exception at the first event, `error`.
    Other clients expect the second event, `response.failed`."""
    body = error_body(exc)
    first = event(context, types.StreamError, code=body.code, message=body.message, param=body.param, error=body)
    if context.request.format_data is None:  # the request could not be read, so a response cannot repeat its fields
        return first
    failed = _started(context, "failed")
    failed.error = types.ResponseFailure(message=exc.message)
    return first + event(context, types.Failed, response=failed)


def _started(context: ResponseContext, status: types.Status = "in_progress") -> types.Response:
    return types.Response(
        id=f"{PREFIX}_{context.nonce}",
        created_at=context.created,
        status=status,
        model=context.request.model,
        output=[],
        system_fingerprint=context.system_fingerprint,
        **context.request.format_data,
    )


def _finished(context: ResponseContext, delta: Delta, totals: Totals, output: Output) -> types.Response:
    """Returns the complete response. delta: the last delta"""
    response = _started(context, INCOMPLETE if delta.finish is Finish.LENGTH else COMPLETED)
    if delta.finish is Finish.LENGTH:
        response.incomplete_details = types.IncompleteDetails()
    else:
        response.completed_at = int(time.time())
    response.output, response.usage = output.items, _usage(totals, output)
    response.stop_reason, response.seed, response.timings = delta.stop, delta.seed, totals.timings
    response.receipt = receipt_of(context, delta)
    return response


def _usage(totals: Totals, output: Output) -> types.ResponseUsage:
    usage = totals.usage
    return types.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=types.InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=types.OutputTokensDetails(reasoning_tokens=output.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )

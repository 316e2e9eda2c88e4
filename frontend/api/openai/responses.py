"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses

A stream is response.created, response.in_progress, the steps of each item (`output`), and response.completed or, where
the answer was cut off, response.incomplete. Nothing is stored: a request brings all of its history.
"""

import time
from typing import Any

from frontend.api import structured_output
from frontend.api.common import (
    AsyncDeltas,
    ModelContext,
    ResponseContext,
    Totals,
    check_length,
    check_model,
    generation_request,
    openai_error,
    sampling,
    to_json,
)
from frontend.api.openai.completions import error
from frontend.api.openai.responses_input import SCORES, ResponseCountRequest, ResponseRequest, response_prompt
from frontend.api.openai.responses_output import BEGUN, CUT, DONE, Output, Step, numbered, step
from frontend.api.structured_output import TextFormat
from frontend.api.tools import answer_form, functions, offer, openai_choice
from frontend.errors import SluiceError
from frontend.output_parser.tool_choice import Function
from frontend.request import Delta, Finish, GenerationRequest
from shared.messages import Sampling

__all__ = [
    "NAME",
    "PREFIX",
    "REQUEST",
    "complete",
    "count_tokens",
    "error",
    "parse",
    "stream_error",
    "stream_writer",
]

NAME, PREFIX = "responses", "resp"
REQUEST = ResponseRequest
OPENING = ("response.created", "response.in_progress")


async def parse(request: ResponseRequest, context: ModelContext) -> GenerationRequest:
    """Raises BadRequest or Unprocessable, naming the field."""
    check_model(request.model, context)
    logprobs, most = _logprobs_asked(request), request.max_output_tokens
    known = functions(request.tools)
    offered = offer(known, openai_choice(request.tool_choice), request.parallel_tool_calls, context)
    ids, begins = await response_prompt(request, known, context)
    check_length("input", len(ids), most or 1, context)
    wanted = structured_output.openai(request, _format(request), "text.format")
    grammar, parser_config = await answer_form(offered, begins, await structured_output.grammar(wanted), context)
    chosen = sampling(request, most or context.max_seq_len - len(ids), context, logprobs=logprobs, grammar=grammar)
    return generation_request(
        request, context, (ids,), chosen, stops=request.stops, parser_config=parser_config,
        format_data=_echoed(request, known, chosen),
    )  # fmt: skip


def _logprobs_asked(request: ResponseRequest) -> int | None:
    """`top_logprobs` implies log-probabilities."""
    asked = SCORES in (request.include or ()) or request.top_logprobs
    return (request.top_logprobs or 0) if asked else None


def _format(request: ResponseRequest) -> TextFormat | None:
    return request.text.format if request.text else None


async def count_tokens(request: ResponseCountRequest, context: ModelContext) -> dict[str, Any]:
    """The `input_tokens` that the same body would have as a request."""
    check_model(request.model, context)
    known = functions(request.tools)
    offer(known, openai_choice(request.tool_choice), request.parallel_tool_calls, context)
    ids = (await response_prompt(request, known, context)).ids
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _echoed(request: ResponseRequest, known: tuple[Function, ...], chosen: Sampling) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    tools = [{"type": "function", **one.definition["function"], "strict": one.strict} for one in known]
    return {
        "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls, "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "temperature": chosen.temperature,
        "text": {"format": _format(request) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto", "tools": tools,
        "top_logprobs": request.top_logprobs or 0, "top_p": chosen.top_p, "truncation": "disabled",
        "user": request.user, "service_tier": "default", "store": False, "background": False,
        "previous_response_id": None,
    }  # fmt: skip


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
    """The end of a failed stream, as OpenAI's: its SDKs raise on the first event, other clients know the second."""
    failed = _response(context, "failed") | {"error": {"code": "server_error", "message": exc.message}}
    error_event = step("error", code=exc.code, message=exc.message, param=exc.param, error=openai_error(exc))
    return numbered([error_event, step("response.failed", response=failed)], context.event_numbers)


def _response(context: ResponseContext, status: str) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}_{context.nonce}", "object": "response", "created_at": context.created, "status": status,
        "completed_at": None, "error": None, "incomplete_details": None, "model": context.request.model, "output": [],
        "usage": None, **context.request.format_data,
    }  # fmt: skip


def _ended(context: ResponseContext, delta: Delta, totals: Totals, output: Output) -> dict[str, Any]:
    """The complete response; `delta` is its last one."""
    cut = delta.finish is Finish.LENGTH
    end = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
    results = {"output": output.items, "usage": _usage(totals, output), "stop_reason": delta.stop, "seed": delta.seed}
    timings = {"timings": totals.timings} if context.request.timings else {}
    return _response(context, CUT if cut else DONE) | end | results | timings


def _usage(totals: Totals, output: Output) -> dict[str, Any]:
    usage = totals.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }  # fmt: skip

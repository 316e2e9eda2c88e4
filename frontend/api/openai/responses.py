"""OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses

A stream has response.created, response.in_progress, the events of each output item (`Output`), and response.completed
or, if the answer was cut off, response.incomplete. A server without a store keeps nothing, so a request contains its
whole conversation; with one, routes/kept.py puts the kept items in front of its input.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar, Literal

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.openai import responses_types as types
from frontend.api.openai.chat import CustomInput, call_id, logprob_entries
from frontend.api.openai.chunk_writer import check_stream_options, error, error_body, telemetry_events
from frontend.api.openai.response_types import TokenLogprobs
from frontend.api.openai.responses_request import (
    SCORES,
    ResponseCountRequest,
    ResponseRequest,
    check_stateless,
    response_prompt,
)
from frontend.api.receipts import receipt_of
from frontend.api.request_builder import ParsedRequest, check_forms, prepare
from frontend.chat.reasoning import budget_of
from frontend.chat.tool_fields import checked, openai_tool_choice
from frontend.errors import SluiceError, api_status
from frontend.model_context import ModelContext, before_truncation, check_model
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import Function, ParserConfig, Reasoning, ToolChoice
from frontend.output_parser.parser import output_parser
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob
from frontend.schema.base import to_json
from frontend.schema.request_fields import UNLIMITED
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields
from frontend.structured_output.fields import TextFormat
from shared.messages import Sampling

# The output items of OpenAI's Responses API: reasoning, text and tool calls, in the order of the answer.
#
# `Output` turns an answer's deltas into items, and returns the events of every delta. A stream sends the events; a
# complete response keeps the items. This part does not know the response around the items.

IN_PROGRESS: Literal["in_progress"] = "in_progress"
COMPLETED: Literal["completed"] = "completed"
INCOMPLETE: Literal["incomplete"] = "incomplete"


def event(context: ResponseContext, kind: type[types.Event], **fields: Any) -> bytes:
    """Encodes an event of the response's stream, with the next sequence number."""
    return _bytes(kind, to_json(kind(sequence_number=next(context.event_numbers), **fields)))


def _bytes(kind: type[types.Event], data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(kind.__struct_config__.tag).encode(), data)


class Item:
    """An output item that is still open. `texts` holds its text so far."""

    PREFIX: ClassVar[str]  # prefix of the item's id
    DEFAULT_STATUS: ClassVar[types.ItemStatus] = COMPLETED  # the status of an item without an explicit end
    DELTA: ClassVar[type[types.ItemEvent]]

    def __init__(self, context: ResponseContext, index: int) -> None:
        self.index = index
        self.id = f"{self.PREFIX}_{context.nonce}{index:02x}"
        self.texts: list[str] = []
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._context = context

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def state(self, status: types.ItemStatus) -> types.OutputItem:
        raise NotImplementedError

    def begin(self) -> list[bytes]:
        item = self.state(IN_PROGRESS)
        return [event(self._context, types.OutputItemAdded, output_index=self.index, item=item)]

    def more(self, text: str, scores: Sequence[TokenLogprob]) -> bytes:
        self.texts.append(text)
        return self._delta(b'"delta":%s' % to_json(text))

    def _delta(self, fields: bytes) -> bytes:
        """Encodes a delta event. fields: its variable part; the constant part is encoded once per item"""
        return b'%s,%s,"sequence_number":%d}\n\n' % (self._delta_head, fields, next(self._context.event_numbers))

    @cached_property
    def _delta_head(self) -> bytes:
        tag = str(self.DELTA.__struct_config__.tag)
        return b"event: %s\ndata: %s" % (tag.encode(), to_json({"type": tag, **self.position})[:-1])

    def end(self, status: types.ItemStatus) -> list[bytes]:
        return [event(self._context, types.OutputItemDone, output_index=self.index, item=self.state(status))]


class PartItem(Item):
    """An item whose text is in one content part."""

    DONE: ClassVar[type[types.PartEvent]]

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self.position["content_index"] = 0

    def part(self) -> types.OutputText | types.ReasoningText:
        raise NotImplementedError

    def text_fields(self) -> dict[str, Any]:
        return {"text": self.text}

    def begin(self) -> list[bytes]:
        return [*super().begin(), event(self._context, types.ContentPartAdded, **self.position, part=self.part())]

    def end(self, status: types.ItemStatus) -> list[bytes]:
        return [
            event(self._context, self.DONE, **self.position, **self.text_fields()),
            event(self._context, types.ContentPartDone, **self.position, part=self.part()),
            *super().end(status),
        ]


class Reason(PartItem):
    PREFIX, DELTA, DONE = "rs", types.ReasoningTextDelta, types.ReasoningTextDone

    def part(self) -> types.ReasoningText:
        return types.ReasoningText(text=self.text)

    def state(self, status: types.ItemStatus) -> types.ReasoningItem:
        content = [] if status == IN_PROGRESS else [self.part()]
        return types.ReasoningItem(id=self.id, summary=[], content=content, status=status)


class Message(PartItem):
    PREFIX, DELTA, DONE = "msg", types.OutputTextDelta, types.OutputTextDone

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._scores: list[TokenLogprobs] = []

    def part(self) -> types.OutputText:
        return types.OutputText(text=self.text, annotations=[], logprobs=self._scores)

    def text_fields(self) -> dict[str, Any]:
        return {"text": self.text, "logprobs": self._scores}

    def state(self, status: types.ItemStatus) -> types.MessageItem:
        content = [] if status == IN_PROGRESS else [self.part()]
        return types.MessageItem(id=self.id, status=status, content=content)

    def more(self, text: str, scores: Sequence[TokenLogprob]) -> bytes:
        self.texts.append(text)
        entries = logprob_entries(self._context, scores, []) if scores else []
        self._scores += entries
        return self._delta(b'"delta":%s,"logprobs":%s' % (to_json(text), to_json(entries)))


class ToolCall(Item):
    """A tool call. Its text is the arguments of the call."""

    PREFIX, DEFAULT_STATUS = "fc", INCOMPLETE
    DELTA: ClassVar[type[types.ItemEvent]] = types.ArgumentsDelta

    def __init__(self, context: ResponseContext, index: int, call: int, name: str) -> None:
        super().__init__(context, index)
        self._call_id = call_id(context, 0, call)
        self._name = name

    def state(self, status: types.ItemStatus) -> types.FunctionCallItem:
        return types.FunctionCallItem(
            id=self.id, status=status, arguments=self.text, call_id=self._call_id, name=self._name
        )

    def end(self, status: types.ItemStatus) -> list[bytes]:
        fields = {"arguments": self.text, "name": self._name}
        return [event(self._context, types.ArgumentsDone, **self.position, **fields), *super().end(status)]


class CustomToolCall(ToolCall):
    """A call of a custom tool. Its text is the input of the tool."""

    PREFIX = "ctc"
    DELTA = types.InputDelta

    def __init__(self, context: ResponseContext, index: int, call: int, name: str) -> None:
        super().__init__(context, index, call, name)
        self._input = CustomInput()

    def state(self, status: types.ItemStatus) -> types.CustomToolCallItem:  # type: ignore[override]
        return types.CustomToolCallItem(
            id=self.id, status=status, input=self.text, call_id=self._call_id, name=self._name
        )

    def more(self, text: str, scores: Sequence[TokenLogprob]) -> bytes:
        added = self._input.feed(text)
        return super().more(added, scores) if added else b""

    def end(self, status: types.ItemStatus) -> list[bytes]:
        done = event(self._context, types.InputDone, **self.position, input=self.text)
        return [done, *Item.end(self, status)]


class Output:
    """Turns deltas into items. `items` holds the finished items, which are all items after the last delta."""

    def __init__(self, context: ResponseContext) -> None:
        self.items: list[types.OutputItem] = []
        self.reasoning_tokens = 0
        self._context = context
        self._parser = output_parser(context.request.parser_config or ParserConfig())
        self._open: Item | None = None
        self._scored = context.request.sampling.logprobs is not None
        self._plain = context.request.parser_config is None and not self._scored  # whether all output is plain text
        self._scores: list[TokenLogprob] = []  # log-probabilities that no event has carried yet

    def add(self, delta: Delta) -> list[bytes]:
        if self._plain and delta.finish is None:
            return self._say(Message, text) if (text := delta.text) else []
        events: list[bytes] = []
        for text, tokens, scores in self._pieces(delta):
            self._scores += scores
            before = self._parser.reasoning
            for parsed in self._parser.feed(text):
                events += self._write(parsed)
            if Reasoning.OPEN in (before, self._parser.reasoning):
                self.reasoning_tokens += tokens
        return events if delta.finish is None else events + self._finish(delta.finish)

    def _pieces(self, delta: Delta) -> Iterator[tuple[str, int, Sequence[TokenLogprob]]]:
        """Yields (text, number of tokens, log-probabilities): one by one for each token if log-probabilities are
        requested or reasoning may go on, otherwise once for the delta."""
        if not self._scored and self._parser.reasoning is Reasoning.DONE:
            yield delta.text, len(delta.ids), ()
            return
        for id, text, score in zip_longest(delta.ids, delta.texts, delta.logprobs or ()):
            yield text or "", id is not None, () if score is None else (score,)

    def _write(self, parsed: Event) -> list[bytes]:
        match parsed:
            case Text(text):
                return self._say(Message, text)
            case ReasoningText(text):
                return self._say(Reason, text) if self._context.request.shown.reasoning else []
            case CallStart(call, name):
                kind = CustomToolCall if name in self._context.request.shown.custom_tools else ToolCall
                return self._begin(kind(self._context, self._next, call, name))
            case CallArguments(_, fragment):
                return self._more(fragment)
            case CallEnd():
                return self._close(COMPLETED)

    def _say(self, kind: type[PartItem], text: str) -> list[bytes]:
        opening = [] if type(self._open) is kind else self._begin(kind(self._context, self._next))
        return opening + self._more(text) if opening else self._more(text)

    @property
    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: Item) -> list[bytes]:
        before, self._open = self._close(), item
        return before + item.begin()

    def _more(self, text: str) -> list[bytes]:
        scores, self._scores = self._scores, []
        return [self._open.more(text, scores)] if self._open else []

    def _close(self, status: types.ItemStatus | None = None) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        self.items.append(item.state(status or item.DEFAULT_STATUS))
        return item.end(status or item.DEFAULT_STATUS)

    def _finish(self, finish: Finish) -> list[bytes]:
        """Closes the last item, or adds an empty message if there is no item. Log-probabilities without text are sent,
        too."""
        events = [data for parsed in self._parser.finish() for data in self._write(parsed)]
        if not self.items and self._open is None:
            events += self._begin(Message(self._context, 0))
        if self._scores and type(self._open) is Message:
            events += self._more("")
        return events + self._close(INCOMPLETE if finish is Finish.LENGTH else None)


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
    check_stateless(request)
    choice = _tool_choice(request, context)
    reading = ParsedRequest(
        request, "input", request.most_tokens, "max_output_tokens", ends_with_context=True,
        logprobs=_logprobs_asked(request),
        tool_choice=choice,
        form=fields.openai(request, _format(request), "text.format"),
        budget=budget_of(request, request.reasoning.max_tokens if request.reasoning else None),
    )  # fmt: skip
    prompt = await response_prompt(
        request, reading.functions, before_truncation(request.truncate_prompt_tokens, context)
    )
    made = await prepare(reading, [prompt.ids], context, prompt.begins, prompt.images)
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
    await check_forms([*fields.of_format(_format(request), "text.format")])
    ids = (await response_prompt(request, known, context.unlimited)).ids
    return types.InputTokens(input_tokens=len(ids))


def _echoed(request: ResponseRequest, known: tuple[Function, ...], chosen: Sampling) -> dict[str, Any]:
    """Returns the fields of a response that repeat fields of its request."""
    tools = [_echoed_tool(one) for one in known]
    return {
        "instructions": request.instructions,
        "max_output_tokens": None if request.most_tokens == UNLIMITED else request.most_tokens,
        "max_tool_calls": request.max_tool_calls, "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": types.ReasoningSettings(effort=request.reasoning.effort if request.reasoning else None),
        "temperature": chosen.temperature,
        "text": types.TextSettings(format=_format(request) or {"type": "text"}),
        "tool_choice": request.tool_choice or "auto", "tools": tools,
        "top_logprobs": request.top_logprobs or 0, "top_p": chosen.top_p,
        "truncation": request.truncation or "disabled",
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
            events += [event(self._context, kind, response=started(self._context)) for kind in OPENING]
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
    totals, output, answer = Totals(context.request), Output(context), Answer(context)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            output.add(delta)
            answer.add(delta)
    return to_json(_finished(context, answer.end, totals, output))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the two events that end a failed stream. OpenAI's SDKs raise an exception at the first event, `error`.
    Other clients expect the second event, `response.failed`."""
    body = error_body(exc)
    first = event(context, types.StreamError, code=body.code, message=body.message, param=body.param, error=body)
    if context.request.format_data is None:  # the request could not be read, so a response cannot repeat its fields
        return first
    failed = started(context, "failed")
    failed.error = types.ResponseFailure(message=exc.message)
    return first + event(context, types.Failed, response=failed)


def started(context: ResponseContext, status: types.Status = "in_progress") -> types.Response:
    """Returns the response as it is before its first item."""
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
    response = started(context, INCOMPLETE if delta.finish is Finish.LENGTH else COMPLETED)
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

"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat

A stream has a chunk with each choice's role, text chunks, chunks with the finish reasons, a usage chunk if requested,
and `[DONE]`. chunk_writer.py writes those of plain chats. This module reads the request, and writes the chunks with
tool calls or reasoning and the response that is not streamed.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import msgspec
from msgspec import UNSET

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.openai import response_types as types
from frontend.api.openai.chat_request import ChatRequest, chat_prompt, with_prediction
from frontend.api.openai.chunk_writer import (
    FINISH,
    LEAST,
    ChunkWriter,
    Shape,
    as_fields,
    check_stream_options,
    error_body,
    output_ids,
    prompt_ids,
    prompt_logprobs,
    stream_error,
    usage_of,
)
from frontend.api.receipts import receipt_of
from frontend.api.request_builder import ParsedRequest, prepare
from frontend.chat.reasoning import budget_of
from frontend.chat.template_sandbox import with_template
from frontend.chat.tool_fields import openai_tool_choice
from frontend.errors import ContextLengthExceeded, SluiceError, Unprocessable, api_status
from frontend.model_context import ModelContext, before_truncation, check_model
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import ParserConfig, Reasoning
from frontend.output_parser.parser import (
    Call,
    ContinuedParser,
    OutputParser,
    ParsedOutput,
    feed_counting,
    output_parser,
)
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob
from frontend.schema.base import JsonArray, in_slices, to_json
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip
NAME, PREFIX = "chat", "chatcmpl"
FRAMING = SERVER_SENT_EVENTS
REQUEST = ChatRequest
status = api_status
ROLE = b'"delta":{"role":"assistant","content":null,"refusal":null}'


def _created(request: ChatRequest) -> int | None:
    """Returns when the answer to continue was created, if its receipt is given."""
    receipt = None if request.continue_from is None else request.continue_from.receipt
    return None if receipt is None else receipt.created


async def parse(request: ChatRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    _check_together(request)
    context = with_template(context, request.chat_template, _created(request))
    reading = ParsedRequest(
        request, "messages", _max_tokens(request), request.limit_name, ends_with_context=True, n=request.n,
        logprobs=_logprobs_asked(request),
        tool_choice=openai_tool_choice(request.tools, request.tool_choice, request.parallel_tool_calls, context),
        form=fields.openai(request, request.response_format, "response_format"),
        budget=budget_of(request, request.reasoning.max_tokens if request.reasoning else None),
    )  # fmt: skip
    prompt = await chat_prompt(request, reading.functions, before_truncation(request.truncate_prompt_tokens, context))
    reading = await with_prediction(reading, request.prediction, context)
    return await prepare(reading, [prompt.ids], context, prompt.begins, prompt.images)


def _check_together(request: ChatRequest) -> None:
    """Raises Unprocessable for a field that has no meaning without another field, as OpenAI does."""
    if request.tool_choice not in (None, "none", "auto", "required") and not request.tools:
        raise Unprocessable("`tool_choice` needs `tools`", param="tool_choice", code="out_of_range")
    check_stream_options(request, request.stream)


def _logprobs_asked(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise Unprocessable("`top_logprobs` needs `logprobs`", param="top_logprobs", code="out_of_range")
    return (request.top_logprobs or 0) if request.logprobs else None


def _max_tokens(request: ChatRequest) -> int | None:
    """Returns the limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
    given = request.limits
    if len(given) > 1:
        raise Unprocessable(
            "`max_tokens` and `max_completion_tokens` differ", param="max_completion_tokens", code="out_of_range"
        )
    return given.pop() if given else None


def stream_writer(context: ResponseContext) -> ChunkWriter:
    parser_config = context.request.parser_config
    if parser_config is None:
        return ChunkWriter(context, SHAPE, ROLE)
    return ParsedChunkWriter(context, SHAPE, ROLE, parser_config)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    choices = [_Choice(context, index) for index in range(context.request.n)]
    totals = Totals(context.request)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            await choices[delta.index].add_scored(delta)
    finished = [choice.finished(totals) for choice in choices]
    return to_json(
        types.ChatCompletion(
            id=context.id,
            created=context.created,
            model=context.request.model,
            system_fingerprint=context.system_fingerprint,
            choices=finished,
            usage=usage_of(totals.usage),
            timings=totals.timings,
            prompt_token_ids=prompt_ids(context, 0),
            prompt_logprobs=await prompt_logprobs(context, choices[0].end),
        )
    )


def _chunk_head(context: ResponseContext) -> types.ChatChunkHead:
    return types.ChatChunkHead(
        id=context.id,
        created=context.created,
        model=context.request.model,
        system_fingerprint=context.system_fingerprint,
    )


class _Choice(Answer):
    """A choice of a response that is not streamed."""

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._scores = JsonArray(each=16)
        self._before: list[str] = []

    async def add_scored(self, delta: Delta) -> None:
        """Adds a delta. Keeps its log-probabilities as JSON, which takes a tenth of their memory."""
        self.add(delta)
        self._before += delta.extras.before
        if delta.logprobs:
            context, scores = self.context, self._scores
            await in_slices(delta.logprobs, lambda token: scores.extend(logprob_entries(context, [token])))

    def finished(self, totals: Totals) -> types.ChatChoice:
        """Returns the finished choice, and adds its reasoning tokens to the totals."""
        end, scored = self.end, self.context.request.sampling.logprobs is not None
        answer, reason = self._answer(end, totals)
        return types.ChatChoice(
            index=self.index,
            message=answer,
            logprobs=types.ChatLogprobs(content=cast(Any, self._scores.raw)) if scored else None,
            finish_reason=reason,
            stop_reason=end.stop,
            matched_stop=end.matched_stop,
            seed=end.seed,
            receipt=receipt_of(self.context, end),
            token_ids=output_ids(self.context, self.ids),
        )

    def _answer(self, end: Delta, totals: Totals) -> tuple[types.ChatAnswer, types.ChatFinishReason]:
        parser_config = self.context.request.parser_config
        if parser_config is None:
            return types.ChatAnswer(content=self.text), FINISH[self.finish]
        parsed = ParsedOutput.parse(self.texts, parser_config, len(self.ids), self._before)
        totals.reasoning_tokens = (totals.reasoning_tokens or 0) + parsed.reasoning_tokens
        return message(parsed, self.context, self.index), finish_reason(parsed.parser, end)


def _logprobs(context: ResponseContext, delta: Delta, offset: int = 0) -> types.ChatLogprobs:
    return types.ChatLogprobs(content=logprob_entries(context, delta.logprobs or ()))


def logprob_entries(
    context: ResponseContext, scores: Iterable[TokenLogprob], no_bytes: list[int] | None = None
) -> list[types.TokenLogprobs]:
    """Returns an entry for each token. no_bytes: the `bytes` of a token that adds no text"""
    text, raw = context.token_text, context.tokenizer.token_bytes

    def score(id: int, logprob: float) -> types.TokenScore:
        return types.TokenScore(token=text(id), logprob=max(LEAST, logprob), bytes=list(raw(id)) or no_bytes)

    return [
        types.TokenLogprobs(
            token=text(token.token_id),
            logprob=max(LEAST, token.logprob),
            bytes=list(raw(token.token_id)) or no_bytes,
            top_logprobs=[score(*rival) for rival in (token.top_with_token if token.top else ())],
        )
        for token in scores
    ]


SHAPE = Shape(_chunk_head, before=b'"delta":{"content":', after=b"}", without=b'"delta":{}', logprobs=_logprobs)


def error(exc: SluiceError, request_id: str) -> bytes:
    """Encodes an error. For a prompt that is too long, adds its length and the context's, for llama.cpp's clients."""
    body = error_body(exc)
    if isinstance(exc, ContextLengthExceeded):
        body.n_prompt_tokens, body.n_ctx = exc.prompt, exc.limit
    return to_json(types.OpenAIError(error=body))


# Reasoning and tool calls in OpenAI's chat format: https://platform.openai.com/docs/guides/function-calling
#
# DeepSeek, vLLM and SGLang call the reasoning `reasoning_content`, OpenRouter calls it `reasoning`.


def call_id(context: ResponseContext, choice: int, index: int) -> str:
    return f"call_{context.nonce}{choice:02x}{index:02x}"


def finish_reason(parser: OutputParser, delta: Delta) -> types.ChatFinishReason:
    """Returns "tool_calls" if the model called tools and ended by itself, else why the choice ended."""
    stopped = delta.finish is Finish.STOP and isinstance(delta.stop, str)
    if parser.called and delta.finish is not Finish.LENGTH and not stopped:
        return "tool_calls"
    return FINISH[delta.finish or Finish.LENGTH]


def message(parsed: ParsedOutput, context: ResponseContext, choice: int) -> types.ChatAnswer:
    """Returns the message of a complete response. Its content is null if the message only calls tools."""
    calls = [_whole_call(context, call_id(context, choice, i), one) for i, one in enumerate(parsed.calls)]
    thought = parsed.reasoning or UNSET if context.request.shown.reasoning else UNSET
    return types.ChatAnswer(
        content=parsed.text if parsed.text or not calls else None,
        reasoning_content=thought,
        reasoning=thought,
        tool_calls=calls or UNSET,
    )


def _whole_call(context: ResponseContext, id: str, call: Call) -> types.ToolCall:
    if call.name in context.request.shown.custom_tools:
        custom = types.CustomCall(name=call.name, input=input_of(call.arguments))
        return types.ToolCall(id=id, type="custom", custom=custom)
    return types.ToolCall(id=id, function=types.FunctionCall(name=call.name, arguments=call.arguments))


class ParsedChunkWriter(ChunkWriter):
    """Writes one chunk for each parser event. Log-probabilities are held back until the next chunk."""

    def __init__(self, context: ResponseContext, shape: Shape, opening: bytes, parser_config: ParserConfig) -> None:
        super().__init__(context, shape, opening)
        self._choices = [_ParsedChoice(parser_config) for _ in range(context.request.n)]
        self._hides = not context.request.shown.reasoning
        self._reasoning_tokens = self._totals.reasoning_tokens = 0

    def _write(self, delta: Delta) -> bytes:
        self._totals.add(delta)
        choice = self._choices[delta.index]
        if delta.added is not None and delta.added.before:
            choice.parser = ContinuedParser(choice.parser, delta.added.before)
        if not self._plain:
            choice.add_details(delta, self._context.request.shown.ids)
        if choice.parser.reasoning is Reasoning.DONE:
            events = choice.parser.feed(delta.text)
        else:
            events, thought = feed_counting(choice.parser, delta.texts, len(delta.ids))
            self._reasoning_tokens += thought
            self._totals.reasoning_tokens = self._reasoning_tokens
        if delta.finish is not None:
            events += choice.parser.finish()
        events = choice.joined(events, delta.finish is not None)
        data = b"".join([self._chunk(delta.index, self._delta(delta.index, event)) for event in events])
        return data if delta.finish is None else data + self._rest_of(choice, delta) + self._finish(delta)

    def _delta(self, choice: int, event: Event) -> types.ChatDelta | None:
        """Returns the event as the delta of a chunk; None if the event needs no chunk."""
        match event:
            case Text(text):
                self._choices[choice].has_output = True
                return types.ChatDelta(content=text)
            case ReasoningText(text):
                return None if self._hides or not text else types.ChatDelta(reasoning_content=text, reasoning=text)
            case CallStart(index, name):
                self._choices[choice].has_output = True
                id = call_id(self._context, choice, index)
                if name in self._context.request.shown.custom_tools:
                    self._choices[choice].inputs[index] = CustomInput()
                    custom = types.CustomCallDelta(name=name, input="")
                    return _call(types.ToolCallDelta(index=index, id=id, type="custom", custom=custom))
                function = types.FunctionCallDelta(name=name, arguments="")
                return _call(types.ToolCallDelta(index=index, id=id, type="function", function=function))
            case CallArguments(index, fragment) if index in self._choices[choice].inputs:
                text = self._choices[choice].inputs[index].feed(fragment)
                custom = types.CustomCallDelta(input=text)
                return _call(types.ToolCallDelta(index=index, custom=custom)) if text else None
            case CallArguments(index, fragment):
                return _call(types.ToolCallDelta(index=index, function=types.FunctionCallDelta(arguments=fragment)))
            case CallEnd():
                return None

    def _chunk(self, index: int, content: types.ChatDelta | None) -> bytes:
        if content is None:
            return b""
        if self._plain:
            return self._bare[index] + b'"delta":' + to_json(content) + self._rest
        scores, self._choices[index].scores = self._choices[index].scores, []
        ids, self._choices[index].ids = self._choices[index].ids, []
        scored = self._context.request.sampling.logprobs is not None
        delta = Delta(index, [], [], logprobs=scores)
        return b'%s"delta":%s,"logprobs":%s,"finish_reason":null%s}]%s}\n\n' % (
            self._bare[index], to_json(content),
            to_json(self._shape.logprobs(self._context, delta, 0) if scored else None),
            as_fields("token_ids", output_ids(self._context, ids)), self._usage(),
        )  # fmt: skip

    def _rest_of(self, choice: "_ParsedChoice", delta: Delta) -> bytes:
        """Encodes a chunk with empty content if log-probabilities or ids are left, or if there was no output."""
        if choice.has_output and not (choice.scores or choice.ids):
            return b""
        return self._chunk(delta.index, types.ChatDelta(content=""))

    def _reason(self, delta: Delta) -> types.ChatFinishReason:
        return finish_reason(self._choices[delta.index].parser, delta)


def _call(part: types.ToolCallDelta) -> types.ChatDelta:
    return types.ChatDelta(tool_calls=[part])


class _ParsedChoice:
    def __init__(self, parser_config: ParserConfig) -> None:
        self.parser: OutputParser = output_parser(parser_config)
        self.has_output = False  # whether text or a tool call was sent
        self.scores: list[TokenLogprob] = []
        self.ids: list[int] = []
        self.inputs: dict[int, CustomInput] = {}  # of calls of custom tools, by their index
        self._in_pieces = parser_config.reasoning_in_pieces
        self._thought: list[str] = []  # reasoning held back until its end; unused if reasoning is sent in pieces

    def joined(self, events: list[Event], ended: bool) -> list[Event]:
        """Returns the events to send now.

        A block of reasoning becomes one event at its end, unless it is sent in pieces.

        ended: whether no more events will follow
        """
        if self._in_pieces:
            return events
        sent: list[Event] = []
        for event in events:
            if isinstance(event, ReasoningText):
                self._thought.append(event.text)
            else:
                sent += [*self._whole_thought(), event]
        return sent + self._whole_thought() if ended or self.parser.reasoning is Reasoning.DONE else sent

    def _whole_thought(self) -> list[Event]:
        text = "".join(self._thought)
        self._thought.clear()
        return [ReasoningText(text)] if text else []

    def add_details(self, delta: Delta, with_ids: bool) -> None:
        """Keeps log-probabilities and ids for the next chunk."""
        self.scores += delta.logprobs or ()
        self.ids += delta.ids if with_ids else ()


# The input of a custom tool, decoded from the arguments of the function that stands for it, as they arrive.

_BEGIN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])")


class CustomInput:
    """Turns the fragments of a JSON object with one text (`{"input": "…"}`) into the text.

    A text that is cut off ends where it is cut. Arguments of another form, which no grammar allows, have no input.
    """

    def __init__(self) -> None:
        self._left = ""  # what has arrived and is not decoded
        self._inside = self._ended = False

    def feed(self, fragment: str) -> str:
        """Returns the text that a fragment adds; "" while an escape is incomplete."""
        if self._ended:
            return ""
        self._left += fragment
        if not self._inside:
            if (begin := _BEGIN.match(self._left)) is None:
                return ""
            self._inside, self._left = True, self._left[begin.end() :]
        return self._text()

    def _text(self) -> str:
        left, at, texts = self._left, 0, list[str]()
        while at < len(left):
            if left[at] == '"':
                self._ended = True
                break
            found = (_ESCAPE if left[at] == "\\" else _PLAIN).match(left, at)
            if found is None or self._may_go_on(found[0], len(left) - at):
                break
            texts.append(_decoded(found[0]) if left[at] == "\\" else found[0])
            at = found.end()
        self._left = left[at:]
        return "".join(texts)

    def _may_go_on(self, escape: str, left: int) -> bool:
        """Whether the escape is the first half of a surrogate pair, and the second half may still arrive."""
        return len(escape) == 6 and escape[:2] == "\\u" and escape[2:4].lower() in HIGH and left < 12


HIGH = ("d8", "d9", "da", "db")


def _decoded(escape: str) -> str:
    try:
        text: str = msgspec.json.decode(f'"{escape}"')
    except msgspec.DecodeError:  # half of a pair, which is no character
        return "\ufffd"
    return text


def input_of(arguments: str) -> str:
    """Returns the input in the whole arguments of a call."""
    return CustomInput().feed(arguments)

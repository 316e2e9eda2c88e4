"""Reasoning and tool calls in OpenAI's chat format: https://platform.openai.com/docs/guides/function-calling

DeepSeek, vLLM and SGLang call the reasoning `reasoning_content`, OpenRouter calls it `reasoning`. Responses with
neither reasoning nor tool calls are written by `chat`.
"""

from msgspec import UNSET

from frontend.api.answer import ResponseContext
from frontend.api.openai import response_types as types
from frontend.api.openai.chunk_writer import FINISH, ChunkWriter, Shape, as_fields, output_ids
from frontend.output_parser.custom_input import CustomInput, input_of
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
from frontend.request import Delta, Finish, TokenLogprob
from frontend.schema.base import to_json


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
        self._choices = [_Choice(parser_config) for _ in range(context.request.n)]
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

    def _rest_of(self, choice: "_Choice", delta: Delta) -> bytes:
        """Encodes a chunk with empty content if log-probabilities or ids are left, or if there was no output."""
        if choice.has_output and not (choice.scores or choice.ids):
            return b""
        return self._chunk(delta.index, types.ChatDelta(content=""))

    def _reason(self, delta: Delta) -> types.ChatFinishReason:
        return finish_reason(self._choices[delta.index].parser, delta)


def _call(part: types.ToolCallDelta) -> types.ChatDelta:
    return types.ChatDelta(tool_calls=[part])


class _Choice:
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

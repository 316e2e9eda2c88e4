"""Thoughts and calls in OpenAI's chat answers: https://platform.openai.com/docs/guides/function-calling

`reasoning_content` is what DeepSeek, vLLM and SGLang call a thought, `reasoning` what OpenRouter does. Answers without
either are worded in `chat`.
"""

from typing import Any

from frontend.api.common import ResponseContext, to_json
from frontend.api.openai.completions import FINISH, ChunkWriter, Shape
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig
from frontend.output_parser.parsed import ParsedOutput
from frontend.output_parser.parser import OutputParser
from frontend.request import Delta, Finish, TokenLogprob


def call_id(context: ResponseContext, choice: int, index: int) -> str:
    return f"call_{context.nonce}{choice:02x}{index:02x}"


def reason(parser: OutputParser, delta: Delta) -> str:
    """A finish reason: calls are what a model that ended by itself wants to be done."""
    stopped = delta.finish is Finish.STOP and isinstance(delta.stop, str)
    if parser.called and delta.finish is not Finish.LENGTH and not stopped:
        return "tool_calls"
    return FINISH[delta.finish or Finish.LENGTH]


def message(said: ParsedOutput, context: ResponseContext, choice: int) -> dict[str, Any]:
    """The content of a whole answer's message; null when it only calls."""
    calls = [
        {"id": call_id(context, choice, i), "type": "function",
         "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(said.calls)
    ]  # fmt: skip
    text = said.text
    content: dict[str, Any] = {"content": text if text or not calls else None}
    return content | _thought(said.reasoning) | ({"tool_calls": calls} if calls else {})


def _thought(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if text else {}


class ParsedChunkWriter(ChunkWriter):
    """Writes chunks of one parser event each; log-probabilities go with the next chunk that is sent."""

    def __init__(self, context: ResponseContext, shape: Shape, opening: bytes, parser_config: ParserConfig) -> None:
        super().__init__(context, shape, opening)
        self._choices = [_Choice(parser_config) for _ in range(context.request.n)]

    def _write(self, delta: Delta) -> bytes:
        self._totals.add(delta)
        choice = self._choices[delta.index]
        choice.scores += delta.logprobs or ()
        events = choice.parser.feed(delta.text)
        if delta.finish is not None:
            events += choice.parser.finish()
        data = b"".join([self._chunk(delta.index, self._worded(delta.index, event)) for event in events])
        return data if delta.finish is None else data + self._rest_of(choice, delta) + self._finish(delta)

    def _worded(self, choice: int, event: Event) -> dict[str, Any]:
        """The event as a chunk's delta; empty for one that is not sent."""
        match event:
            case Text(text):
                self._choices[choice].told = True
                return {"content": text}
            case ReasoningText(text):
                return _thought(text)
            case CallStart(index, name):
                self._choices[choice].told = True
                id = call_id(self._context, choice, index)
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case CallArguments(index, fragment):
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
            case CallEnd():
                return {}

    def _chunk(self, index: int, worded: dict[str, Any]) -> bytes:
        if not worded:
            return b""
        scores, self._choices[index].scores = self._choices[index].scores, []
        scored = self._context.request.sampling.logprobs is not None
        delta = Delta(index, [], [], logprobs=scores)
        return b'%s"delta":%s,"logprobs":%s,"finish_reason":null}]%s}\n\n' % (
            self._bare[index], to_json(worded),
            to_json(self._shape.logprobs(self._context, delta, 0) if scored else None), self._usage(),
        )  # fmt: skip

    def _rest_of(self, choice: "_Choice", delta: Delta) -> bytes:
        """An empty content if there was neither text nor call, with the log-probabilities that are left."""
        if choice.told and not choice.scores:
            return b""
        return self._chunk(delta.index, {"content": ""})

    def _reason(self, delta: Delta) -> str:
        return reason(self._choices[delta.index].parser, delta)


class _Choice:
    def __init__(self, parser_config: ParserConfig) -> None:
        self.parser = OutputParser(parser_config)
        self.told = False  # whether there was text, or a call
        self.scores: list[TokenLogprob] = []

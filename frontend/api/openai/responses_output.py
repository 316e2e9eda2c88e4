"""The output items of OpenAI's responses: reasoning, text and calls, in order.

`Output` folds deltas into items and returns the events of each delta; a stream sends the events, a complete response
keeps the items. Knows nothing of the response around the items.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

from frontend.api.common import ResponseContext, to_json
from frontend.api.openai.chat import logprob_entries
from frontend.api.openai.chat_output import call_id
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig, Reasoning
from frontend.output_parser.parser import OutputParser
from frontend.request import Delta, Finish, TokenLogprob

Step = bytes  # an event without its number and its end
BEGUN, DONE, CUT = "in_progress", "completed", "incomplete"


def step(kind: str, **fields: Any) -> Step:
    return b"event: %s\ndata: %s" % (kind.encode(), to_json({"type": kind, **fields})[:-1])


def numbered(steps: Sequence[Step], numbers: Iterator[int]) -> bytes:
    """The events of the steps."""
    return b"".join([b'%s,"sequence_number":%d}\n\n' % (one, next(numbers)) for one in steps])


class Item:
    """An open item; `text` is what it has so far."""

    PREFIX: ClassVar[str]  # of item ids
    LEFT: ClassVar = DONE  # its status if another item begins before its end

    def __init__(self, context: ResponseContext, index: int) -> None:
        self.index = index
        self.id = f"{self.PREFIX}_{context.nonce}{index:02x}"
        self.texts: list[str] = []
        self.at: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.delta = b""  # the beginning of each delta event

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def json(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> list[Step]:
        return [step("response.output_item.added", output_index=self.index, item=self.json(BEGUN))]

    def more(self, text: str, scores: Sequence[TokenLogprob]) -> Step:
        self.texts.append(text)
        return self.delta + to_json(text)

    def end(self, status: str) -> list[Step]:
        return [step("response.output_item.done", output_index=self.index, item=self.json(status))]


class TextItem(Item):
    """An item with one content part, which holds the text."""

    KIND: ClassVar[str]  # the type of the part, also in the names of its events

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self.at["content_index"] = 0
        self.delta = step(f"response.{self.KIND}.delta", **self.at) + b',"delta":'

    def part(self) -> dict[str, Any]:
        return {"type": self.KIND, "text": self.text}

    def begin(self) -> list[Step]:
        return [*super().begin(), step("response.content_part.added", **self.at, part=self.part())]

    def end(self, status: str) -> list[Step]:
        part = self.part()
        fields = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        return [
            step(f"response.{self.KIND}.done", **self.at, **fields),
            step("response.content_part.done", **self.at, part=part),
            *super().end(status),
        ]


class ReasoningItem(TextItem):
    PREFIX, KIND = "rs", "reasoning_text"

    def json(self, status: str) -> dict[str, Any]:
        content = [] if status == BEGUN else [self.part()]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class Message(TextItem):
    PREFIX, KIND = "msg", "output_text"

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._context = context
        self._scored: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        return super().part() | {"annotations": [], "logprobs": self._scored}

    def json(self, status: str) -> dict[str, Any]:
        content = [] if status == BEGUN else [self.part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def more(self, text: str, scores: Sequence[TokenLogprob]) -> Step:
        scored = logprob_entries(self._context, scores, []) if scores else []
        self._scored += scored
        return b'%s,"logprobs":%s' % (super().more(text, scores), to_json(scored))


class Call(Item):
    """A function call; its text is the arguments."""

    PREFIX, LEFT = "fc", CUT

    def __init__(self, context: ResponseContext, index: int, call: int, name: str) -> None:
        super().__init__(context, index)
        self._call_id = call_id(context, 0, call)
        self._name = name
        self.delta = step("response.function_call_arguments.delta", **self.at) + b',"delta":'

    def json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "type": "function_call", "status": status, "arguments": self.text,
            "call_id": self._call_id, "name": self._name,
        }  # fmt: skip

    def end(self, status: str) -> list[Step]:
        fields = {**self.at, "arguments": self.text, "name": self._name}
        return [step("response.function_call_arguments.done", **fields), *super().end(status)]


class Output:
    """The items of one response. `add` takes every delta; `items` are the closed ones, after the last delta all."""

    def __init__(self, context: ResponseContext) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._context = context
        self._parser = OutputParser(context.request.parser_config or ParserConfig())
        self._open: Item | None = None
        self._scored = context.request.sampling.logprobs is not None
        self._plain = (
            context.request.parser_config is None and not self._scored
        )  # all output is text, which has a faster path
        self._scores: list[TokenLogprob] = []  # of tokens that no event has covered yet

    def add(self, delta: Delta) -> list[Step]:
        if self._plain and delta.finish is None:
            return self._text(Message, text) if (text := delta.text) else []
        steps: list[Step] = []
        for text, tokens, scores in self._pieces(delta):
            self._scores += scores
            before = self._parser.reasoning
            for event in self._parser.feed(text):
                steps += self._events(event)
            if Reasoning.OPEN in (before, self._parser.reasoning):
                self.reasoning_tokens += tokens
        return steps if delta.finish is None else steps + self._finish(delta.finish)

    def _pieces(self, delta: Delta) -> Iterator[tuple[str, int, Sequence[TokenLogprob]]]:
        """Text, number of tokens and scores; token by token if it matters on which side of a mark each token is."""
        if not self._scored and self._parser.reasoning is Reasoning.DONE:
            yield delta.text, len(delta.ids), ()
            return
        for id, text, score in zip_longest(delta.ids, delta.texts, delta.logprobs or ()):
            yield text or "", id is not None, () if score is None else (score,)

    def _events(self, event: Event) -> list[Step]:
        match event:
            case Text(text):
                return self._text(Message, text)
            case ReasoningText(text):
                return self._text(ReasoningItem, text)
            case CallStart(call, name):
                return self._begin(Call(self._context, self._next, call, name))
            case CallArguments(_, fragment):
                return self._more(fragment)
            case CallEnd():
                return self._close(DONE)

    def _text(self, kind: type[TextItem], text: str) -> list[Step]:
        opening = [] if type(self._open) is kind else self._begin(kind(self._context, self._next))
        return opening + self._more(text) if opening else self._more(text)

    @property
    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: Item) -> list[Step]:
        before, self._open = self._close(), item
        return before + item.begin()

    def _more(self, text: str) -> list[Step]:
        scores, self._scores = self._scores, []
        return [self._open.more(text, scores)] if self._open else []

    def _close(self, status: str = "") -> list[Step]:
        item, self._open = self._open, None
        if item is None:
            return []
        self.items.append(item.json(status or item.LEFT))
        return item.end(status or item.LEFT)

    def _finish(self, finish: Finish) -> list[Step]:
        """Closes the output. Every response has an item; scores that were not sent yet go with its last text."""
        steps = [step for event in self._parser.finish() for step in self._events(event)]
        if not self.items and self._open is None:
            steps += self._begin(Message(self._context, 0))
        if self._scores and type(self._open) is Message:
            steps += self._more("")
        return steps + self._close(CUT if finish is Finish.LENGTH else "")

"""Ollama's /api/chat and /api/generate.

A stream's lines hold parts of a message or text; the last line has `done` and the statistics.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, Meta
from msgspec.structs import replace

from frontend import model_context
from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.formats import Format
from frontend.api.ollama import types
from frontend.api.ollama.types import AnswerFields, Asked, Images, Message, messages_prompt, with_images
from frontend.api.openai.chat import logprob_entries
from frontend.api.openai.response_types import TokenLogprobs
from frontend.api.receipts import receipt_of
from frontend.api.request_builder import prepare
from frontend.chat.history import chat_message
from frontend.chat.prompt import MAX_MESSAGES, Prompt, render_prompt
from frontend.chat.tool_fields import FunctionTools, openai_choice, tool_choice
from frontend.errors import BadRequest, SluiceError, UnknownModel, api_status, unknown_model
from frontend.model_context import ModelContext, check_characters, check_ids
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import Reasoning, ToolChoice
from frontend.output_parser.parser import output_parser
from frontend.request import Delta, Finish, GenerationRequest, Usage
from frontend.schema.base import JsonArray, in_slices, to_json
from frontend.schema.request_fields import TextIds, doc
from frontend.server.sse import JSON_LINES
from frontend.text.fill_in_middle import with_suffix
from shared.messages import Timings

# The lines of Ollama's streams, and whole responses, which combine the contents of all lines.


class AnswerPart(NamedTuple):
    """A part of the model's output."""

    text: str = ""
    thinking: str = ""
    calls: tuple[types.OllamaCall, ...] = ()


# Makes an object of the response from a part of the output, all ids up to the end of this part, and more fields.
Make = Callable[[AnswerPart, list[int], dict[str, Any]], types.OllamaAnswer]


class Listener:
    """Turns deltas into text, reasoning and calls. A call is held back until it is complete, because its arguments are
    a JSON object in this format."""

    def __init__(self, context: ResponseContext) -> None:
        config = context.request.parser_config
        self._nonce = context.nonce
        self._parser = None if config is None else output_parser(config)
        self._names: list[str] = []
        self._arguments: list[str] = []

    def feed(self, delta: Delta) -> Iterable[AnswerPart]:
        if self._parser is None:
            return [AnswerPart(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])
        return [said for event in events if any(said := self._part(event))]

    def _part(self, event: Event) -> AnswerPart:
        match event:
            case Text(text):
                return AnswerPart(text)
            case ReasoningText(text):
                return AnswerPart(thinking=text)
            case CallStart(_, name):
                self._names.append(name)
                self._arguments.append("")
            case CallArguments(index, fragment):
                self._arguments[index] += fragment
            case CallEnd(index):
                return AnswerPart(calls=(self._call(index),))
        return AnswerPart()

    def _call(self, index: int) -> types.OllamaCall:
        arguments = msgspec.json.decode(self._arguments[index], type=dict[str, Any])
        function = types.OllamaFunction(index=index, name=self._names[index], arguments=arguments)
        return types.OllamaCall(id=f"call_{self._nonce}{index:02x}", function=function)


class LineWriter:
    """Writes one response as lines of JSON."""

    def __init__(self, context: ResponseContext, make: Make) -> None:
        self._context, self._head = context, head(context)
        self._make = make
        self._totals = Totals(context.request)
        self._listener = Listener(context)
        self._ids: list[int] = []
        self._scores: list[TokenLogprobs] = []  # of tokens that no line has contained yet

    def write(self, deltas: list[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            self._totals.add(delta)
            self._ids += delta.ids
            self._scores += logprob_entries(self._context, delta.logprobs or ())
            lines += [self._line(said, {}) for said in self._listener.feed(delta)]
            if delta.finish is not None:
                lines.append(self._line(AnswerPart(), end(self._context, delta, self._totals.usage)))
        return b"".join(lines)

    def end(self) -> bytes:
        return b""

    def _line(self, said: AnswerPart, more: dict[str, Any]) -> bytes:
        scores, self._scores = self._scores, []
        if scores:
            more = {"logprobs": scores, **more}
        return to_json(self._make(said, self._ids, self._head | more)) + b"\n"


async def complete_lines(context: ResponseContext, arriving: AsyncDeltas, make: Make) -> bytes:
    """Returns the response of a request that does not stream."""
    totals, listener, answer = Totals(context.request), Listener(context), Answer(context)
    parts, scores = list[AnswerPart](), JsonArray(each=16)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            answer.add(delta)
            parts += listener.feed(delta)
            await in_slices(delta.logprobs or (), lambda token: scores.extend(logprob_entries(context, [token])))
    whole = AnswerPart(
        "".join([part.text for part in parts]),
        "".join([part.thinking for part in parts]),
        tuple([one for part in parts for one in part.calls]),
    )
    scored = {} if context.request.sampling.logprobs is None else {"logprobs": scores.raw}
    return to_json(make(whole, answer.ids, head(context) | end(context, answer.end, totals.usage) | scored))


# The common parts of all responses of Ollama's API: model names, first and last fields, errors.

TAG = ":latest"
status = api_status
FINISH: dict[Finish, types.DoneReason] = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


def check_model(name: str, context: ModelContext) -> None:
    """Raises UnknownModel for a model that is not served. The tag `:latest` may be omitted or added."""
    for known in (name, name.removesuffix(TAG) or name, name + TAG):
        with suppress(UnknownModel):
            return model_context.check_model(known, context)
    raise unknown_model(name)


def tagged(name: str) -> str:
    """Returns the name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + TAG


def rfc3339(seconds: float) -> str:
    """Returns a time as RFC 3339 text. seconds: since 1970"""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def head(context: ResponseContext) -> dict[str, str]:
    """Returns the first fields of every object of a response."""
    asked: Asked = context.request.format_data
    return {"model": asked.model, "created_at": rfc3339(context.created)}


def loaded(request: AnswerFields, make: Callable[[dict[str, Any]], types.OllamaAnswer]) -> bytes:
    """Returns the response to a request that only loads the model or, with `keep_alive` 0, unloads it.

    A server with one model has nothing to do. With many models, the route has done the loading (ModelTable.usable).
    """
    kept = request.keep_alive
    unload = kept is not None and not str(kept).strip("-0.msh")  # 0, "0", "0s", "0h0m"
    fields = {"model": request.model, "created_at": rfc3339(int(time.time()))}
    return to_json(make(fields | {"done": True, "done_reason": "unload" if unload else "load"})) + b"\n"


def end(context: ResponseContext, delta: Delta, usage: Usage) -> dict[str, Any]:
    """Returns the fields that only the last object of a response has. The times were measured by the worker."""
    times = delta.timings or Timings()
    return {
        "done": True,
        "done_reason": FINISH[delta.finish or Finish.LENGTH],
        "total_duration": _ns(times.queue_ms + times.prefill_ms + times.decode_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(times.prefill_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(times.decode_ms),
        "receipt": receipt_of(context, delta),
    }


def error(exc: SluiceError, request_id: str) -> bytes:
    if isinstance(exc, UnknownModel):  # clients look for Ollama's words, and then pull the model
        return to_json(types.OllamaError(error=f"model '{exc.name}' not found"))
    return to_json(types.OllamaError(error=exc.message))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the line that ends a failed stream. No line with `done` follows."""
    return error(exc, request_id) + b"\n"


def _ns(ms: float) -> int:
    return round(ms * 1e6)


# /api/chat.


class OllamaChatRequest(AnswerFields):
    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None,
        doc("The conversation, oldest first; empty: answer at once that the model is loaded"),
    ] = None
    tools: FunctionTools = None


async def _parse_chat(request: OllamaChatRequest, context: ModelContext) -> GenerationRequest | bytes:
    """Makes a GenerationRequest. A request without messages only loads the model, so its response is returned instead.

    Raises NotFound, BadRequest or Unprocessable.
    """
    check_model(request.model, context)
    if not request.messages:
        return loaded(request, lambda fields: _chat_answer(AnswerPart(), [], fields))
    tools = tool_choice(request.tools, openai_choice(None), True, context)
    prompt = await messages_prompt(request.messages, tools.functions, request.template_arguments(context), context)
    return await prepare(request.reading("messages", tools), [prompt.ids], context, prompt.begins, prompt.images)


def _chat_writer(context: ResponseContext) -> LineWriter:
    return LineWriter(context, _chat_answer)


async def _complete_chat(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    return await complete_lines(context, arriving, _chat_answer)


def _chat_answer(said: AnswerPart, ids: list[int], fields: dict[str, Any]) -> types.OllamaChat:
    message = types.OllamaMessage(
        content=said.text, thinking=said.thinking or UNSET, tool_calls=list(said.calls) or UNSET
    )
    return types.OllamaChat(message=message, **fields)


CHAT = Format(
    "ollama chat",
    "chat",
    JSON_LINES,
    OllamaChatRequest,
    _parse_chat,
    _chat_writer,
    _complete_chat,
    status,
    error,
    stream_error,
)


# Ollama's /api/generate: answers a prompt or, with `raw`, continues its text.
#
# A stream's lines hold parts of the generated text.


class OllamaTextRequest(AnswerFields):
    ONLY: ClassVar = {**AnswerFields.ONLY, "template": ("",)}

    prompt: Annotated[str, doc("The text to answer; empty, also `suffix`: answer at once that the model is loaded")] = (
        ""
    )
    suffix: Annotated[str, doc("The text after the answer, for models that fill in the middle")] = ""
    system: Annotated[str, doc("What stands before the prompt")] = ""
    images: Images = None
    raw: Annotated[bool, doc("Continue the prompt as it is, without the chat template")] = False
    context: Annotated[TextIds | None, doc("The `context` of the previous answer")] = None


async def _parse_text(request: OllamaTextRequest, context: ModelContext) -> GenerationRequest | bytes:
    """Makes a GenerationRequest. A request without a prompt only loads the model, so its response is returned instead.

    Raises NotFound, BadRequest or Unprocessable.
    """
    check_model(request.model, context)
    if not (request.prompt or request.suffix):
        return loaded(request, lambda fields: types.OllamaText(response="", **fields))
    before = request.context or []
    check_ids("context", before, context.vocab_size)
    made = await _prompt(request, context)
    prompt = before + made.ids
    images = tuple(replace(image, start=len(before) + image.start) for image in made.images)
    as_text = request.raw or bool(request.suffix)
    reading = request.reading("prompt", None if as_text else ToolChoice(), None if request.raw else prompt)
    return await prepare(reading, [prompt], context, made.begins, images)


async def _prompt(request: OllamaTextRequest, context: ModelContext) -> Prompt:
    """Returns the prompt: a chat of one turn or, with `raw` or `suffix` or without a template, the text itself."""
    if context.template and not (request.raw or request.suffix):
        system = [chat_message("system", request.system)] if request.system else []
        said, sources = with_images(request.images, request.prompt)
        messages = [*system, chat_message("user", said) | sources]
        return await render_prompt(messages, context, request.template_arguments(context), param="prompt")
    if request.images:
        raise BadRequest(
            "`images` need the model's chat template, so not `raw` or `suffix`", param="images",
            code="unsupported_content",
        )  # fmt: skip
    before = request.system or (context.preset.system if context.preset and not request.raw else "")
    text = "\n\n".join([one for one in (before, request.prompt) if one])
    check_characters("prompt", text, context)
    ids = await context.tokenizer.encode(text, not request.context)
    if not (ids or request.suffix):
        raise BadRequest("`prompt` has no tokens", param="prompt", code="empty_prompt")
    check_ids("prompt", ids, context.vocab_size)
    if request.suffix:
        [ids] = await with_suffix([ids], request.suffix, context.tokenizer)
    return Prompt(ids, Reasoning.DONE)


def _text_writer(context: ResponseContext) -> LineWriter:
    return LineWriter(context, _text_answers(context))


async def _complete_text(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    return await complete_lines(context, arriving, _text_answers(context))


def _text_answers(context: ResponseContext) -> Make:
    asked: Asked = context.request.format_data
    before = asked.before

    def answer(said: AnswerPart, ids: list[int], fields: dict[str, Any]) -> types.OllamaText:
        told = UNSET if before is None or not fields.get("done") else [*before, *ids]
        return types.OllamaText(response=said.text, thinking=said.thinking or UNSET, context=told, **fields)

    return answer


GENERATE = Format(
    "ollama generate",
    "text",
    JSON_LINES,
    OllamaTextRequest,
    _parse_text,
    _text_writer,
    _complete_text,
    status,
    error,
    stream_error,
)

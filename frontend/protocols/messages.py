"""Anthropic's messages: https://platform.claude.com/docs/en/api/messages

A stream is message_start, content_block_start, ping, content_block_delta…, content_block_stop, message_delta,
message_stop. Sampling fields that Anthropic lacks (`seed`, `stop_token_ids`, …), `timings` and the seed that
reproduces an answer are extensions.
"""

from collections.abc import AsyncGenerator
from typing import Any

from frontend.errors import SluiceError, TooLarge
from frontend.protocols import constraint
from frontend.protocols.common import (
    MAX_STOPS,
    OPENAI,
    QUEUING,
    SAMPLING,
    Context,
    Meta,
    Totals,
    Wakes,
    check_length,
    check_model,
    json,
    sampling,
)
from frontend.protocols.conversation import MAX_MESSAGES, Turn, content, prompt
from frontend.protocols.fields import (
    Field,
    Table,
    anything,
    choice,
    each,
    exactly,
    integer,
    list_of,
    only,
    read,
    record,
    refused,
    some_text,
)
from frontend.types import Ask, Delta, Finish, Usage

PREFIX = "msg"
FINISH = {Finish.EOS: "end_turn", Finish.STOP: "stop_sequence", Finish.LENGTH: "max_tokens"}

_text = content(cache_control=anything, citations=only([]))
_message = record({
    "role": Field(choice("user", "assistant"), required=True),
    "content": Field(_text, required=True),
})  # fmt: skip

COUNTED: Table = {
    "model": OPENAI["model"],
    "messages": Field(each(_message, MAX_MESSAGES), required=True),
    "system": Field(_text),
    "chat_template_kwargs": Field(exactly(dict), {}),
    "tools": Field(only([])),
    "tool_choice": Field(only({"type": "none"})),
    "thinking": Field(only({"type": "disabled"})),
    "cache_control": Field(anything),
    "output_config": Field(record(constraint.OUTPUT_CONFIG), {}),
    "mcp_servers": Field(only([])),
    "context_management": Field(refused),
}

FIELDS: Table = {
    **COUNTED,
    **QUEUING,
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed")},
    **{name: SAMPLING[name] for name in ("min_tokens", "ignore_eos", "stop_token_ids")},
    **{name: OPENAI[name] for name in ("stream", "stream_options", "timings")},
    **{name: OPENAI[name] for name in ("user", "metadata", "store", "service_tier")},
    "max_tokens": Field(integer(1), required=True),
    "stop_sequences": Field(list_of(some_text, MAX_STOPS), ()),
    "container": Field(refused),
    "inference_geo": Field(refused),
    "speed": Field(refused),
}


async def parse(body: dict[str, Any], context: Context) -> Ask:
    """Raises BadRequest or Unprocessable, naming the field."""
    values = read(FIELDS, body)
    check_model(values["model"], context)
    form = await constraint.grammar(constraint.anthropic(values))
    chosen = sampling(values, values["max_tokens"], context, grammar=form)
    ids = await _prompt(values, context)
    check_length("messages", len(ids), chosen.max_tokens, context)
    return Ask(
        prompts=(ids,), sampling=chosen, stops=values["stop_sequences"], stream=values["stream"],
        timings=values["timings"], model=context.model,
        priority=values["priority"], deadline_ms=values["deadline_ms"],
        continuous_usage=values["stream_options"].get("continuous_usage_stats", False),
    )  # fmt: skip


async def count_tokens(body: dict[str, Any], context: Context) -> dict[str, Any]:
    """What the same body, sent as a message, would have as its `input_tokens`."""
    values = read(COUNTED, body)
    check_model(values["model"], context)
    return {"input_tokens": len(await _prompt(values, context))}


async def _prompt(values: dict[str, Any], context: Context) -> list[int]:
    """An answer goes on where a last message of the assistant's stops."""
    turns = _turns(values["system"], values["messages"])
    resume = turns[-1]["role"] == "assistant"
    return await prompt(turns, context, values["chat_template_kwargs"], not resume, resume)


def _turns(system: str | None, messages: tuple[Turn, ...]) -> list[Turn]:
    """Neighbours of one role are one turn, a line each."""
    turns: list[Turn] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if turns and turns[-1]["role"] == message["role"]:
            message = message | {"content": f"{turns.pop()['content']}\n{message['content']}"}
        turns.append(message)
    return turns


async def stream(meta: Meta, wakes: Wakes) -> AsyncGenerator[bytes]:
    """The answer as server-sent events, one `bytes` for all that came at once."""
    totals = Totals(meta.ask)
    opening = _start(meta) + BLOCK_START + PING
    async for wake in wakes:
        data = opening
        for delta in wake:
            totals.add(delta)
            data += _text_delta(delta, totals if meta.ask.continuous_usage else None)
            if delta.finish is not None:
                data += BLOCK_STOP + _end(meta, delta, totals) + STOP
        if data:
            yield data
        opening = b""


async def whole(meta: Meta, wakes: Wakes) -> bytes:
    """The answer in one piece."""
    totals = Totals(meta.ask)
    texts: list[str] = []
    last: Delta | None = None
    async for wake in wakes:
        for last in wake:
            totals.add(last)
            texts += last.texts
    if last is None or last.finish is None:
        raise SluiceError("the message has no end")
    blocks = [{"type": "text", "text": "".join(texts)}]
    usage = _usage(totals.usage)
    return json(_head(meta) | {"content": blocks, **_stop(last), "usage": usage, **_extras(meta, last, totals)})


def error(exc: SluiceError, request_id: str) -> bytes:
    told = {"type": _kind(exc), "message": exc.message}
    return json({"type": "error", "error": told, "request_id": request_id})


def failure(exc: SluiceError, request_id: str) -> bytes:
    """The end of a stream that went wrong: no message_stop follows."""
    return b"event: error\ndata: " + error(exc, request_id) + b"\n\n"


def _kind(exc: SluiceError) -> str:
    if isinstance(exc, TooLarge):
        return "request_too_large"
    if exc.code == "model_not_found":
        return "not_found_error"
    return "api_error" if exc.kind == "internal_error" else exc.kind


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name, data)


def _named(kind: str, **fields: Any) -> bytes:
    return _event(kind.encode(), json({"type": kind, **fields}))


BLOCK_START = _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
PING = _named("ping")
BLOCK_STOP = _named("content_block_stop", index=0)
STOP = _named("message_stop")
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


def _text_delta(delta: Delta, totals: Totals | None) -> bytes:
    """`totals` only where the client asked for running usage."""
    text = delta.text
    if not text and (totals is None or not delta.ids):
        return b""
    usage = b"" if totals is None else b',"usage":' + json(_usage(totals.usage))
    return b"%s%s}%s}\n\n" % (DELTA, json(text), usage)


def _head(meta: Meta) -> dict[str, Any]:
    return {"id": f"{PREFIX}_{meta.nonce}", "type": "message", "role": "assistant", "model": meta.ask.model}


def _start(meta: Meta) -> bytes:
    """What was found in the cache is known, and told, at the end."""
    nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(Usage(len(meta.ask.prompts[0]), 0))
    return _named("message_start", message={**_head(meta), **nothing, "usage": usage})


def _end(meta: Meta, delta: Delta, totals: Totals) -> bytes:
    return _named("message_delta", delta=_stop(delta), usage=_usage(totals.usage), **_extras(meta, delta, totals))


def _stop(delta: Delta) -> dict[str, Any]:
    """A stop token id ends a turn, as the model's own do; only a text is a stop sequence."""
    sequence = delta.stop if isinstance(delta.stop, str) else None
    finish = Finish.EOS if delta.finish is Finish.STOP and sequence is None else delta.finish
    return {"stop_reason": FINISH[finish or Finish.LENGTH], "stop_sequence": sequence}


def _extras(meta: Meta, delta: Delta, totals: Totals) -> dict[str, Any]:
    return {"seed": delta.seed} | ({"timings": totals.timings} if meta.ask.timings else {})


def _usage(usage: Usage) -> dict[str, int]:
    """`input_tokens` are all of the prompt's; how many of them were found in the cache is said beside."""
    return {
        "input_tokens": usage.prompt_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
    }  # fmt: skip

"""JSON Schemas of all responses, by name.

Knows no routes. A test holds them against the responses of a running server.
"""

from collections.abc import Mapping
from typing import Any

from frontend.api.request_schema import Schema

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
YES_OR_NO: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
NO: Schema = {"const": False}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def among(*values: str | None) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(also: Mapping[str, Schema] | None = None, **fields: Schema) -> Schema:
    """An object with all of `fields`; those in `also` may be missing."""
    return {"type": "object", "properties": {**fields, **(also or {})}, "required": list(fields)}


def columns(**items: Schema) -> Schema:
    return record(**{name: array(item) for name, item in items.items()})


WORD = either(TEXT, NULL)
LENGTH = either(WHOLE, NULL)
SEED = either(WHOLE, NULL)
STOP = either(TEXT, WHOLE, NULL)
FINISH = among("stop", "length")
SCORE: dict[str, Schema] = {"token": TEXT, "logprob": {"type": "number", "maximum": 0}}
SCORE["bytes"] = either(array({"type": "integer", "minimum": 0, "maximum": 255}), NULL)
CHAT_LOGPROBS = either(record(content=array(record(**SCORE, top_logprobs=array(record(**SCORE)))), refusal=NULL), NULL)
LOGPROBS = either(
    columns(
        tokens=TEXT, text_offset=WHOLE, token_logprobs=either(NUMBER, NULL),
        top_logprobs=either({"type": "object", "additionalProperties": either(NUMBER, NULL)}, NULL),
    ),
    NULL,
)  # fmt: skip
TIMINGS: dict[str, Schema] = {"timings": ref("Timings")}
USAGE: dict[str, Schema] = {"usage": either(ref("Usage"), NULL)}
ENDED: dict[str, Schema] = {"stop_reason": STOP, "seed": SEED}  # ours, beside a finish reason
OPENAI_HEAD: dict[str, Schema] = {"id": TEXT, "created": WHOLE, "model": TEXT}


CHAT_FINISH = among("stop", "length", "tool_calls")
FUNCTION = record(name=TEXT, arguments=TEXT)
CALL: dict[str, Schema] = {"id": TEXT, "type": among("function"), "function": FUNCTION}
THOUGHT: dict[str, Schema] = {"reasoning_content": TEXT, "reasoning": TEXT}
FAILED = record(message=TEXT, type=TEXT, param=WORD, code=WORD)
CALL_PART = either(record(index=WHOLE, **CALL), record(index=WHOLE, function=record(arguments=TEXT)))


def openai_answer(kind: str, head: Mapping[str, Schema], reasons: Schema = FINISH, /, **choice: Schema) -> Schema:
    choices = array(record(index=WHOLE, finish_reason=reasons, **choice, **ENDED))
    return record(TIMINGS, **OPENAI_HEAD, **head, object=among(kind), choices=choices, usage=ref("Usage"))


def openai_chunk(kind: str, head: Mapping[str, Schema], reasons: Schema = FINISH, /, **choice: Schema) -> Schema:
    finish = either(reasons, NULL)
    choices = array(record(ENDED, index=WHOLE, finish_reason=finish, **choice))
    return record({**TIMINGS, **USAGE}, **OPENAI_HEAD, **head, object=among(kind), choices=choices)


OPENAI: dict[str, Schema] = {
    "Usage": record(
        prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE,
        prompt_tokens_details=record(cached_tokens=WHOLE),
    ),
    "Timings": record(
        queue_ms=NUMBER, prefill_ms=NUMBER, decode_ms=NUMBER, cached_tokens=WHOLE,
        inter_token_p50_ms=NUMBER, inter_token_p99_ms=NUMBER,
    ),
    "Completion": openai_answer("text_completion", {}, text=TEXT, logprobs=LOGPROBS),
    "CompletionChunk": openai_chunk("text_completion", {}, text=TEXT, logprobs=LOGPROBS),
    "ChatCompletion": openai_answer(
        "chat.completion", {"system_fingerprint": NULL}, CHAT_FINISH,
        message=record(
            {**THOUGHT, "tool_calls": array(record(**CALL))},
            role=among("assistant"), content=either(TEXT, NULL), refusal=NULL,
        ),
        logprobs=CHAT_LOGPROBS,
    ),
    "ChatCompletionChunk": openai_chunk(
        "chat.completion.chunk", {"system_fingerprint": NULL}, CHAT_FINISH,
        delta=record({
            **THOUGHT, "tool_calls": array(CALL_PART),
            "role": among("assistant"), "content": either(TEXT, NULL), "refusal": NULL,
        }),
        logprobs=CHAT_LOGPROBS,
    ),
    "Model": record(
        id=TEXT, object=among("model"), created=WHOLE, owned_by=TEXT, max_model_len=LENGTH,
        type=among("model"), display_name=TEXT, created_at=TEXT, max_input_tokens=LENGTH,
    ),
    "ModelList": record(object=among("list"), data=array(ref("Model")), has_more=NO, first_id=TEXT, last_id=TEXT),
    "OpenAIError": record(error=FAILED),
}  # fmt: skip

ANYTHING: Schema = {}
PLACE: dict[str, Schema] = {"item_id": TEXT, "output_index": WHOLE}
PART: dict[str, Schema] = {**PLACE, "content_index": WHOLE}
SCORES = array(record(**SCORE, top_logprobs=array(record(**SCORE))))
STATE = among("in_progress", "completed", "incomplete")
TEXT_PART: dict[str, Schema] = {
    "type": among("output_text"),
    "text": TEXT,
    "annotations": array(ANYTHING),
    "logprobs": SCORES,
}
THOUGHT_PART = record(type=among("reasoning_text"), text=TEXT)
ITEM = either(
    record(type=among("reasoning"), id=TEXT, summary=array(ANYTHING), content=array(THOUGHT_PART), status=STATE),
    record(type=among("message"), id=TEXT, status=STATE, role=among("assistant"), content=array(record(**TEXT_PART))),
    record(type=among("function_call"), id=TEXT, status=STATE, arguments=TEXT, call_id=TEXT, name=TEXT),
)


def step(kind: str, **fields: Schema) -> Schema:
    """An event of a response's stream."""
    return record(type=among(kind), **fields, sequence_number=WHOLE)


RESPONSES: dict[str, Schema] = {
    "ResponseUsage": record(
        input_tokens=WHOLE, input_tokens_details=record(cached_tokens=WHOLE, cache_write_tokens=WHOLE),
        output_tokens=WHOLE, output_tokens_details=record(reasoning_tokens=WHOLE), total_tokens=WHOLE,
    ),
    "Response": record(
        {**TIMINGS, **ENDED},
        id=TEXT, object=among("response"), created_at=WHOLE, completed_at=LENGTH,
        status=among("in_progress", "completed", "incomplete", "failed"),
        error=either(record(code=among("server_error"), message=TEXT), NULL),
        incomplete_details=either(record(reason=among("max_output_tokens")), NULL),
        model=TEXT, output=array(ITEM), usage=either(ref("ResponseUsage"), NULL),
        instructions=WORD, max_output_tokens=LENGTH, max_tool_calls=LENGTH, metadata=ANYTHING,
        parallel_tool_calls=YES_OR_NO, reasoning=record(effort=WORD, summary=NULL), temperature=NUMBER,
        text=record(format={"type": "object"}), tool_choice=ANYTHING, tools=array({"type": "object"}),
        top_logprobs=WHOLE, top_p=NUMBER, truncation=among("disabled"), user=ANYTHING, service_tier=among("default"),
        store=NO, background=NO, previous_response_id=NULL,
    ),
    "ResponseEvent": either(
        *[step(f"response.{when}", response=ref("Response"))
          for when in ("created", "in_progress", "completed", "incomplete", "failed")],
        *[step(f"response.output_item.{when}", output_index=WHOLE, item=ITEM) for when in ("added", "done")],
        *[step(f"response.content_part.{when}", **PART, part=either(record(**TEXT_PART), THOUGHT_PART))
          for when in ("added", "done")],
        step("response.output_text.delta", **PART, delta=TEXT, logprobs=SCORES),
        step("response.output_text.done", **PART, text=TEXT, logprobs=SCORES),
        step("response.reasoning_text.delta", **PART, delta=TEXT),
        step("response.reasoning_text.done", **PART, text=TEXT),
        step("response.function_call_arguments.delta", **PLACE, delta=TEXT),
        step("response.function_call_arguments.done", **PLACE, arguments=TEXT, name=TEXT),
        step("error", code=WORD, message=TEXT, param=WORD, error=FAILED),
    ),
    "InputTokens": record(object=among("response.input_tokens"), input_tokens=WHOLE),
}  # fmt: skip

EVENTS: dict[str, Schema] = {
    "TokenEvent": record(token=TEXT, token_id=either(WHOLE, NULL)),
    "DoneEvent": record(
        TIMINGS, finish_reason=among("eos", "stop", "length"),
        usage=record(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE),
    ),
    "ErrorEvent": record(error=TEXT),
}  # fmt: skip

BLOCK = either(
    record(type=among("text"), text=TEXT),
    record(type=among("thinking"), thinking=TEXT, signature=TEXT),
    record(type=among("tool_use"), id=TEXT, name=TEXT, input={"type": "object"}),
)
BLOCK_PART = either(
    record(type=among("text_delta"), text=TEXT),
    record(type=among("thinking_delta"), thinking=TEXT),
    record(type=among("signature_delta"), signature=TEXT),
    record(type=among("input_json_delta"), partial_json=TEXT),
)
STOPPED: dict[str, Schema] = {
    "stop_reason": among("end_turn", "stop_sequence", "max_tokens", "tool_use"),
    "stop_sequence": either(TEXT, NULL),
}
MESSAGE: dict[str, Schema] = {
    "id": TEXT, "type": among("message"), "role": among("assistant"), "model": TEXT, "usage": ref("MessageUsage"),
}  # fmt: skip

ANTHROPIC: dict[str, Schema] = {
    "MessageUsage": record(
        input_tokens=WHOLE, output_tokens=WHOLE, cache_creation_input_tokens=WHOLE, cache_read_input_tokens=WHOLE
    ),
    "Message": record(TIMINGS, **MESSAGE, **STOPPED, content=array(BLOCK), seed=SEED),
    "MessageEvent": either(
        record(
            type=among("message_start"),
            message=record(**MESSAGE, content=array(BLOCK), stop_reason=NULL, stop_sequence=NULL),
        ),
        record(type=among("content_block_start"), index=WHOLE, content_block=BLOCK),
        record(type=among("ping")),
        record(
            {"usage": ref("MessageUsage")}, type=among("content_block_delta"), index=WHOLE,
            delta=BLOCK_PART,
        ),
        record(type=among("content_block_stop"), index=WHOLE),
        record(TIMINGS, type=among("message_delta"), delta=record(**STOPPED), usage=ref("MessageUsage"), seed=SEED),
        record(type=among("message_stop")),
    ),
    "Count": record(input_tokens=WHOLE),
    "AnthropicError": record(
        type=among("error"), error=record({"details": ANYTHING}, type=TEXT, message=TEXT), request_id=TEXT,
    ),
}  # fmt: skip

QUANTILES = record(p50=NUMBER, p95=NUMBER, p99=NUMBER)
PAGES = record(free=WHOLE, cached=WHOLE, owned=WHOLE, total=WHOLE)
THROUGHPUT = record(prompt=NUMBER, generation=NUMBER)
WORKER: dict[str, Schema] = {
    "pid": WHOLE, "epoch": WHOLE, "model": TEXT, "device": TEXT, "dtype": TEXT, "kernels": TEXT, "state": TEXT,
    "progress": NUMBER, "last_step_age_s": NUMBER, "max_seq_len": WHOLE,
    "step": record(target_s=NUMBER, prompt_tokens=WHOLE, prompt_token_s=NUMBER, decodes_s=NUMBER),
}  # fmt: skip

OURS: dict[str, Schema] = {
    "Tokens": record(tokens=array(WHOLE), count=WHOLE, max_model_len=LENGTH),
    "Text": record(prompt=TEXT),
    "TokenizerInfo": record(
        bos_token=WORD, eos_token=WORD, pad_token=WORD, unk_token=WORD, chat_template=WORD, vocab_size=WHOLE
    ),
    "Health": record(status=among("ok"), model_loaded=YES_OR_NO),
    "Ready": record(status=among("ready")),
    "NotReady": record(status=among("not_ready"), reason=TEXT, progress=NUMBER),
    "Stats": record(
        running=WHOLE, waiting=WHOLE, waiting_tokens=WHOLE, draining=YES_OR_NO, pages=PAGES,
        prefix=record(queries=WHOLE, hits=WHOLE), speculation=record(drafted=WHOLE, accepted=WHOLE),
        worker=record(**WORKER),
        workers=array(record(
            **WORKER, address=TEXT, ready=YES_OR_NO, reason=TEXT, streams=WHOLE, load=WHOLE,
            running=WHOLE, waiting=WHOLE, pages=PAGES, throughput=THROUGHPUT,
        )),
        frontends=array(record(pid=WHOLE, id=TEXT, streams=WHOLE)), throughput=THROUGHPUT,
        latency=record(ttft=QUANTILES, itl=QUANTILES, e2e=QUANTILES),
    ),
}  # fmt: skip

SHAPES: Mapping[str, Any] = {**OPENAI, **RESPONSES, **EVENTS, **ANTHROPIC, **OURS}

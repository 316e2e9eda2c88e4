"""What the chat dialects share: how messages become a prompt. Knows text parts and the chat template, no envelope."""

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.errors import BadRequest, Unprocessable
from frontend.protocols.common import Context, check_ids
from frontend.protocols.fields import (
    Field,
    Reader,
    Table,
    anything,
    boolean,
    choice,
    each,
    exactly,
    only,
    reads,
    record,
    refused,
    some_text,
    wrong_type,
)

Turn = dict[str, str]  # role, content, and what else the template may use of a message

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MARK = "\ue000"  # private use: where the text to be continued ends, for the time of rendering
ROLES = {"developer": "system"}  # OpenAI's newer name


def content(**ignored: Reader) -> Reader:
    """A text, or an array of text parts, which are joined as they stand; parts may have the `ignored` fields."""
    table: Table = {
        "type": Field(choice("text"), required=True),
        "text": Field(exactly(str), required=True),
        **{name: Field(reader) for name, reader in ignored.items()},
    }
    plain = record(table)

    @reads(plain.schema)
    def part(name: str, value: Any) -> str:
        kind = value.get("type") if type(value) is dict else None
        if type(kind) is str and kind != "text":
            raise Unprocessable(
                f"`{name}.type` must be text: {kind!r:.80} is not offered by this server",
                param=f"{name}.type", code="unsupported_content",
            )  # fmt: skip
        return str(plain(name, value)["text"])

    parts = each(part, MAX_PARTS)

    @reads({"anyOf": [{"type": "string"}, parts.schema]})
    def reader(name: str, value: Any) -> str:
        if type(value) is not str and type(value) is not list:
            raise wrong_type(name, value, "a string or an array of text parts")
        return value if type(value) is str else "".join(parts(name, value))

    return reader


_message = record({
    "role": Field(choice("system", "developer", "user", "assistant", "tool"), required=True),
    "content": Field(content(), required=True),
    "name": Field(some_text),
    "tool_call_id": Field(some_text),
    "tool_calls": Field(only([])),
    "function_call": Field(refused),
    "refusal": Field(refused),
    "audio": Field(refused),
    "annotations": Field(anything),
})  # fmt: skip


@reads(_message.schema)
def _turn(name: str, value: Any) -> Turn:
    message = _message(name, value)
    role = message["role"]
    also = {key: message[key] for key in ("name", "tool_call_id") if message[key] is not None}
    return {"role": ROLES.get(role, role), "content": message["content"], **also}


OPENAI_CHAT: Table = {
    "messages": Field(each(_turn, MAX_MESSAGES)),
    "chat_template_kwargs": Field(exactly(dict), {}),
    "add_generation_prompt": Field(boolean),
    "continue_final_message": Field(boolean, False),
}


async def openai_prompt(values: Mapping[str, Any], context: Context) -> list[int]:
    """The prompt's ids for fields read by the OPENAI_CHAT table."""
    generate, resume = values["add_generation_prompt"], values["continue_final_message"]
    if generate and resume:
        raise Unprocessable(
            "`continue_final_message` cannot go with `add_generation_prompt`",
            param="continue_final_message", code="out_of_range",
        )  # fmt: skip
    return await prompt(values["messages"], context, values["chat_template_kwargs"], generate is not False, resume)


async def prompt(
    turns: Sequence[Turn], context: Context, kwargs: Mapping[str, Any], generate: bool = True, resume: bool = False
) -> list[int]:
    """Ids of the rendered conversation: with the assistant's turn opened (`generate`) or the last one left open.

    Raises Unprocessable when the model has no chat template, BadRequest when its template refuses the messages.
    """
    if not context.template:
        raise Unprocessable(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    text = _opened(turns, context, kwargs) if resume else context.template.render(turns, generate, **kwargs)
    ids = await context.tokenizer.encode(text, add_special_tokens=False) if text else []
    if not ids:
        raise BadRequest("`messages` have no tokens", param="messages", code="empty_prompt")
    check_ids("messages", ids, context.vocab_size)
    return ids


def _opened(turns: Sequence[Turn], context: Context, kwargs: Mapping[str, Any]) -> str:
    """The prompt up to the end of the last message's content."""
    last = turns[-1] | {"content": turns[-1]["content"] + MARK}
    text, mark, _ = context.template.render([*turns[:-1], last], False, **kwargs).rpartition(MARK)
    if not mark:
        raise Unprocessable(
            "the model's chat template does not show the last message, so it cannot be continued",
            param="messages", code="unsupported_field",
        )  # fmt: skip
    return text

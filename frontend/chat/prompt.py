"""Turns chat messages into a prompt, for all chat formats.

Knows text parts, tools and the chat template, but no API format. The `…_input` module of a format turns the messages of
a request into `ChatMessage`s.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from frontend.api.chat.call_history import ChatMessage, as_the_template_shows, with_alternating_roles
from frontend.api.chat.large_chats import prepared
from frontend.api.chat.untrusted import Rules, marked
from frontend.api.context_length import check_characters
from frontend.api.model_context import ModelContext, check_ids
from frontend.errors import BadRequest, Unprocessable
from frontend.output_parser.calls.tool_prompt import instructions
from frontend.output_parser.formats import ModelFormat, Reasoning
from frontend.output_parser.tool_choice import Function
from frontend.text.chat_template import TemplateError
from frontend.text.picture_marks import PARTED, Source, in_order, joined, whole, without_sources
from shared.messages import Picture

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MARK = "\ue000"  # a private-use character; in a rendered text, it marks the end of the message that shall be continued
ROLES = {"developer": "system"}  # OpenAI's newer name of the role "system"


class _TextPart(Protocol):
    @property
    def text(self) -> str: ...


def join_text(content: str | Sequence[_TextPart] | None) -> str:
    """Returns a message's text, with `PARTED` between its texts (picture_marks.py)."""
    if isinstance(content, str):
        return content
    return content[0].text if content and len(content) == 1 else joined([part.text for part in content or ()])


def parse_arguments(arguments: str) -> Any:
    """Returns a call's arguments as an object, or unchanged if they are not a JSON object."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return value if type(value) is dict else arguments


def check_calls(messages: Sequence[ChatMessage], style: ModelFormat, *, answered: bool, param: str) -> None:
    """Checks that tool calls and results belong together.

    answered: whether an answer follows the last message
    param: the request field that holds the messages

    Raises Unprocessable for the result of an unknown call. If an answer follows, also raises it for calls in the
    last message, because these have no result.
    """
    known: set[str] = set()
    for i, one in enumerate(messages):
        calls = one.get("tool_calls", ())
        known.update(call["id"] for call in calls)
        if style.shows_tools and (id := one.get("tool_call_id")) is not None and id not in known:
            raise Unprocessable(
                f"`{param}`: a tool result belongs to the call {id!r:.80}, which no earlier message makes",
                param=param, code="out_of_range",
            )  # fmt: skip
        if calls and answered and i + 1 == len(messages):
            raise Unprocessable(f"`{param}`: the tool call at the end has no result", param=param, code="out_of_range")


# the prompt


class Prompt(NamedTuple):
    """A rendered and tokenized conversation."""

    ids: list[int]
    begins: Reasoning  # the state of reasoning where the answer begins
    pictures: tuple[Picture, ...] = ()


class Rendered(NamedTuple):
    """A rendered conversation. mark: see Chat in untrusted.py; pictures: in order of appearance"""

    marked: str
    mark: str
    begins: Reasoning
    pictures: Sequence[Source] = ()

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "") if self.mark else self.marked


async def render_prompt(
    messages: Sequence[ChatMessage],
    context: ModelContext,
    kwargs: Mapping[str, Any],
    offered: Iterable[Function] = (),
    generate: bool = True,
    resume: bool = False,
    param: str = "messages",
) -> Prompt:
    """Renders a conversation like `render`, and tokenizes it."""
    functions = list(offered)

    def make(context: ModelContext) -> Rendered:
        return render(messages, context, kwargs, functions, generate, resume, param)

    values = {"tools": [one.definition for one in functions], param: kwargs}
    return await encoded(await prepared(make, context, messages, values), context, param)


async def encoded(rendered: Rendered, context: ModelContext, param: str = "messages") -> Prompt:
    """Tokenizes a conversation. Raises BadRequest if it has no tokens, ContextLengthExceeded if it is too long."""
    check_characters(param, rendered.text, context)
    if rendered.pictures:
        from frontend.api.chat.picture_prompt import with_pictures

        return await with_pictures(rendered, context, param)
    return Prompt(await checked_ids(rendered.marked, rendered.mark, context, param), rendered.begins)


async def checked_ids(marked: str, mark: str, context: ModelContext, param: str) -> list[int]:
    ids = await _encoded(marked, mark, context) if marked else []
    if not ids:
        raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
    check_ids(param, ids, context.vocab_size)
    return ids


def render(
    messages: Sequence[ChatMessage],
    context: ModelContext,
    kwargs: Mapping[str, Any],
    offered: Iterable[Function] = (),
    generate: bool = True,
    resume: bool = False,
    param: str = "messages",
) -> Rendered:
    """Renders a conversation.

    kwargs: variables for the chat template
    offered: the functions that the prompt shows
    generate: whether to open an assistant turn
    resume: whether to leave the last message open instead, so that the answer continues it
    param: the request field that holds the conversation

    If the template refuses the messages, it gets them with alternating roles (`with_alternating_roles`). Raises
    Unprocessable if the model has no chat template, BadRequest if its template refuses the messages in both forms.
    """
    if not context.template:
        raise Unprocessable(
            "this model has no chat template; use /v1/completions", param=param, code="no_chat_template"
        )
    check_calls(messages, context.style, answered=generate or resume, param=param)
    messages, sources = without_sources(messages)
    if sources:
        from frontend.api.chat.picture_prompt import check_sight

        check_sight(context, next(iter(sources.values())).path)
    messages = [one | {"content": _parts(one, context)} if PARTED in one["content"] else one for one in messages]
    chat = marked(messages, list(offered), kwargs, context)
    shown = as_the_template_shows(chat.messages, context.style)
    rest = context, chat.variables, chat.offered, generate, resume
    try:
        rendered = _rendered(shown, *rest)
    except TemplateError as error:
        plain = as_the_template_shows(with_alternating_roles(chat.messages), context.style)
        again = _accepted(plain, *rest) if error.param == "messages" and plain != shown else None
        if again is None:
            error.param = param if error.param == "messages" else error.param
            raise
        rendered, shown = again, plain
    open_text = shown[-1]["content"] if resume else ""
    pictures = [sources[mark] for mark in in_order(shown)] if sources else ()
    return Rendered(rendered, chat.mark, context.style.output_begins(rendered, open_text), pictures)


def _parts(message: ChatMessage, context: ModelContext) -> str:
    """Returns a message's text in parts if the template takes parts; else with line breaks.

    Parts that spell a special token together get a line break, too, because a template may join them.
    """
    text: str = message["content"]
    apart = context.template.takes_parts and not Rules.of(context).of_role(message["role"]).occur_in(
        text.replace(PARTED, "")
    )
    return text if apart else whole(text)


def _accepted(messages: Sequence[ChatMessage], *rest: Any) -> str | None:
    try:
        return _rendered(messages, *rest)
    except TemplateError:
        return None


async def _encoded(rendered: str, mark: str, context: ModelContext) -> list[int]:
    if mark:
        return await context.tokenizer.encode_marked(rendered, mark)
    return await context.tokenizer.encode(rendered, add_special_tokens=False)


def _rendered(
    messages: Sequence[ChatMessage],
    context: ModelContext,
    kwargs: Mapping[str, Any],
    offered: Sequence[Function],
    generate: bool,
    resume: bool,
) -> str:
    def render(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] | None = None) -> str:
        if resume:
            return _opened(messages, context, tools, kwargs)
        return context.template.render(messages, generate, tools, **kwargs)

    if not (offered and context.style.tools_as_text):
        return render(messages, [one.definition for one in offered] or None)
    told = instructions(offered, context.style.tool_format)
    try:
        text = render(_told_by(messages, "system", told))
    except TemplateError:
        text = ""
    text = text if told in text else render(_told_by(messages, "user", told))
    if told not in text:
        raise Unprocessable(
            "`tools` are not supported by this model: its chat template has no place for them",
            param="tools", code="unsupported_field",
        )  # fmt: skip
    return text


def _told_by(messages: Sequence[ChatMessage], role: str, told: str) -> list[ChatMessage]:
    """Adds instructions for the model to the end of the system message, or to the beginning of the first user message
    for templates without system messages."""
    at = next((i for i, one in enumerate(messages) if one["role"] == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": told}, *messages]
    said = messages[at]["content"]
    parts = (said, told) if role == "system" else (told, said)
    return [*messages[:at], messages[at] | {"content": "\n\n".join(filter(None, parts))}, *messages[at + 1 :]]


def _opened(
    messages: Sequence[ChatMessage],
    context: ModelContext,
    tools: Sequence[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
) -> str:
    """Renders the prompt up to the end of the last message's content."""
    last = messages[-1] | {"content": messages[-1]["content"] + MARK}
    text, mark, _ = context.template.render([*messages[:-1], last], False, tools, **kwargs).rpartition(MARK)
    if not mark:
        raise Unprocessable(
            "the model's chat template does not show the last message, so it cannot be continued",
            param="messages", code="unsupported_field",
        )  # fmt: skip
    return text

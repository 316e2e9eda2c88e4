"""Turns chat messages into a prompt, for all chat formats.

Knows text parts, tools and the chat template, but no API format. The module of a format turns the messages of a request
into `ChatMessage`s.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from frontend.chat.history import COMMON_ROLES, ChatMessage, as_the_template_shows, chat_message, with_alternating_roles
from frontend.chat.large_chats import prepared
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext, check_characters, check_ids
from frontend.output_parser.model_format import Function, ModelFormat, Reasoning, Tags
from frontend.output_parser.tool_syntax import instructions
from frontend.text.chat_template import (
    PARTED,
    Source,
    TemplateError,
    in_order,
    joined,
    whole,
    without_sources,
)
from frontend.text.special_tokens import TokenTexts, new_mark
from frontend.text.tokenizer import AddedTokens
from shared.messages import PromptImage
from shared.preset import Preset

if TYPE_CHECKING:  # imported only for a conversation with images
    from frontend.chat.image_decoding import Decoded

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MARK = "\ue000"  # a private-use character; in a rendered text, it marks the end of the message that shall be continued
ROLES = {"developer": "system"}  # OpenAI's newer name of the role "system"


class _TextPart(Protocol):
    @property
    def text(self) -> str: ...


def join_text(content: str | Sequence[_TextPart] | None) -> str:
    """Returns a message's text, with `PARTED` between its texts (frontend/text/chat_template.py)."""
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
    images: tuple[PromptImage, ...] = ()


class Rendered(NamedTuple):
    """A rendered conversation. mark: see Chat; image_sources: in order of appearance"""

    marked: str
    mark: str
    begins: Reasoning
    image_sources: Sequence[Source] = ()

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
    images: "dict[str, Decoded] | None" = None,
) -> Prompt:
    """Renders a conversation like `render`, and tokenizes it.

    images: keeps the images of a request whose conversation is rendered several times, by their marks
    """
    functions = list(offered)

    def make(context: ModelContext) -> Rendered:
        return render(messages, context, kwargs, functions, generate, resume, param)

    values = {"tools": [one.definition for one in functions], param: kwargs}
    return await encoded(await prepared(make, context, messages, values), context, param, images)


async def encoded(
    rendered: Rendered, context: ModelContext, param: str = "messages", images: "dict[str, Decoded] | None" = None
) -> Prompt:
    """Tokenizes a conversation. Raises BadRequest if it has no tokens, ContextLengthExceeded if it is too long."""
    check_characters(param, rendered.text, context)
    if rendered.image_sources:
        from frontend.chat.images import prompt_with_images

        return await prompt_with_images(rendered, context, param, images)
    (ids,) = await checked_ids([rendered.marked], rendered.mark, context, param)
    return Prompt(ids, rendered.begins)


async def checked_ids(marked: Sequence[str], mark: str, context: ModelContext, param: str) -> list[list[int]]:
    """Tokenizes rendered conversations with the same mark. Raises BadRequest if one has no tokens."""
    found = await _encoded(marked, mark, context)
    for ids in found:
        if not ids:
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
    return found


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
    if context.preset is not None:
        messages = begun(messages, context.preset)
    check_calls(messages, context.style, answered=generate or resume, param=param)
    messages, sources = without_sources(messages)
    if sources:
        from frontend.chat.images import check_supports_vision

        check_supports_vision(context, next(iter(sources.values())).path)
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
    images = [sources[mark] for mark in in_order(shown)] if sources else ()
    return Rendered(rendered, chat.mark, context.style.output_begins(rendered, open_text), images)


def begun(messages: Sequence[ChatMessage], preset: Preset) -> list[ChatMessage]:
    """Returns a conversation with what a preset puts before it: its system message, unless the conversation has one at
    its beginning, and its messages."""
    own = [one for one in messages[:1] if one["role"] == "system"]
    system = own or ([chat_message("system", preset.system)] if preset.system else [])
    return [*system, *(chat_message(one.role, one.content) for one in preset.messages), *messages[len(own) :]]


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


async def _encoded(rendered: Sequence[str], mark: str, context: ModelContext) -> list[list[int]]:
    if mark:
        return await context.tokenizer.encode_marked(rendered, mark)
    return await context.tokenizer.encode_batch(rendered, add_special_tokens=False)


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
    tools_text = instructions(offered, context.style.tool_format)
    try:
        text = render(_with_instructions(messages, "system", tools_text))
    except TemplateError:
        text = ""
    text = text if tools_text in text else render(_with_instructions(messages, "user", tools_text))
    if tools_text not in text:
        raise Unprocessable(
            "`tools` are not supported by this model: its chat template has no place for them",
            param="tools", code="unsupported_field",
        )  # fmt: skip
    return text


def _with_instructions(messages: Sequence[ChatMessage], role: str, tools_text: str) -> list[ChatMessage]:
    """Adds instructions for the model to the end of the system message, or to the beginning of the first user message
    for templates without system messages."""
    at = next((i for i, one in enumerate(messages) if one["role"] == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": tools_text}, *messages]
    content = messages[at]["content"]
    parts = (content, tools_text) if role == "system" else (tools_text, content)
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


SHOWN = "\ue001"  # a private-use character; put around a message's number to find out if the template shows the message


def document_arguments(documents: list[dict[str, Any]] | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template variable for documents. Raises Unprocessable if the template shows no documents."""
    if not documents:
        return {}
    if not context.template.mentions("documents"):
        raise Unprocessable(
            "`documents`: this model's chat template has no place for them", param="documents", code="unsupported_field"
        )
    return {"documents": documents}


def check_roles(
    messages: Sequence[ChatMessage], context: ModelContext, kwargs: Mapping[str, Any], offered: Sequence[Function]
) -> None:
    """Checks that the chat template shows every message whose role is not in `COMMON_ROLES`.

    The arguments are those of `render`.

    Raises Unprocessable if the template refuses such a message or leaves it out.
    """
    own = [i for i, one in enumerate(messages) if one["role"] not in COMMON_ROLES]
    signs = {i: f"{SHOWN}{i}{SHOWN}" for i in own}
    signed = [one | {"content": one["content"] + signs.get(i, "")} for i, one in enumerate(messages)]

    def text_with(count: int) -> str:
        """Renders the conversation with only the first `count` of the messages whose role is uncommon."""
        left_out = {*own[count:]}
        kept = [one for i, one in enumerate(signed) if i not in left_out]
        return render(kept, context, kwargs, offered, generate=False).marked if kept else ""

    def refused(count: int) -> bool:
        try:
            text_with(count)
        except TemplateError:
            return True
        return False

    try:
        text = text_with(len(own))
    except TemplateError as error:
        if error.param != "messages" or refused(0):
            raise  # the template refuses the conversation for another reason
        at = own[bisect_left(range(1, len(own)), True, key=refused)]
        raise _refusal(messages, at, error.message) from error
    shown = {int(number) for number in re.findall(f"{SHOWN}(\\d+){SHOWN}", text)}
    if hidden := [i for i in own if i not in shown]:
        raise _refusal(messages, hidden[0], "the model's chat template leaves such messages out")


def _refusal(messages: Sequence[ChatMessage], at: int, problem: str) -> Unprocessable:
    param = f"messages[{at}].role"
    return Unprocessable(f"`{param}` is {messages[at]['role']!r}, and {problem}", param=param, code="unsupported_field")


# Keeps clients from writing special tokens into a chat (its messages, tools, documents and template variables).
#
# A client may write the spelling of a special token. It is then marked before the template is rendered, and the
# tokenizer treats marked spellings as plain text. Only the template's own spellings become special tokens. A chat
# without such spellings is not changed.


class Chat(NamedTuple):
    """The input of a chat template. mark: the text before each spelling that must not become a token; "" if there is
    none."""

    messages: Sequence[ChatMessage]
    offered: Sequence[Function]
    variables: Mapping[str, Any]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The spellings that must not become tokens, depending on the role that wrote the text.

    turns: by role, for messages of some roles
    rest: for messages of all other roles, and for texts without a role
    """

    turns: Mapping[str, TokenTexts]
    rest: TokenTexts

    @classmethod
    def of(cls, context: ModelContext) -> "Rules":
        return _rules(context.tokenizer.added, context.template.sources, context.style.tags)

    def of_role(self, role: str) -> TokenTexts:
        return self.turns.get(role, self.rest)


@lru_cache(maxsize=8)
def _rules(added: AddedTokens, sources: tuple[str, ...], tags: Tags) -> Rules:
    """Returns the spellings that must not become tokens.

    Reasoning tags stay tokens in the assistant's messages, where templates look for them, and in system messages,
    because some explain the tags. An added token that is not special stays a token in every message, because the
    tokenizer's authors treat its spelling as ordinary text. Results of calls and documents have stricter rules, because
    they must not be able to close the tags between which the template shows them.
    """
    written = {one for one in added.tags if any(one in source for source in sources)}
    special = TokenTexts(added.special)
    trusted = TokenTexts(added.special.difference(tags))
    return Rules({"user": special, "system": trusted, "assistant": trusted}, TokenTexts(added.special | written))


def marked(
    messages: Sequence[ChatMessage], offered: Sequence[Function], variables: Mapping[str, Any], context: ModelContext
) -> Chat:
    """Returns the chat with a mark before each spelling of a token that the client has written."""
    rules = Rules.of(context)
    beside = [[one.definition for one in offered], dict(variables)]
    if context.special_tokens_in_content or not (
        any(_occurs(one.values(), rules.of_role(one["role"])) for one in messages) or _occurs(beside, rules.rest)
    ):
        return Chat(messages, offered, variables)
    mark = new_mark()
    return Chat(
        [_marked_message(one, rules.of_role(one["role"]), mark) for one in messages],
        [replace(one, definition=_marked(one.definition, rules.rest, mark)) for one in offered],
        {name: _marked(value, rules.rest, mark) for name, value in variables.items()},
        mark,
    )


async def encode_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool, context: ModelContext
) -> list[list[int]]:
    """Encodes texts (or pairs of texts) from clients that will stand within a template."""
    rest = Rules.of(context).rest
    if context.special_tokens_in_content or not _occurs(texts, rest):
        return await context.tokenizer.encode_many(texts, add_special_tokens)
    return await context.tokenizer.encode_plain(texts, add_special_tokens)


async def encode_pairs(pairs: Sequence[tuple[str, str]], context: ModelContext) -> list[tuple[list[int], int]]:
    """Encodes pairs of texts from clients, and returns for each where its second text begins; see `pairs_of`."""
    plain = not context.special_tokens_in_content and _occurs(pairs, Rules.of(context).rest)
    return await context.tokenizer.encode_pairs(pairs, plain=plain)


def _occurs(value: Any, spellings: TokenTexts) -> bool:
    if isinstance(value, str):
        return spellings.occur_in(value)
    if isinstance(value, dict):
        return _occurs(value.keys(), spellings) or _occurs(value.values(), spellings)
    return isinstance(value, Collection) and any(_occurs(one, spellings) for one in value)


def _marked(value: Any, spellings: TokenTexts, mark: str) -> Any:
    if isinstance(value, str):
        return spellings.marked(value, mark)
    if isinstance(value, dict):
        return {_marked(name, spellings, mark): _marked(one, spellings, mark) for name, one in value.items()}
    return [_marked(one, spellings, mark) for one in value] if isinstance(value, list | tuple) else value


def _marked_message(one: ChatMessage, spellings: TokenTexts, mark: str) -> ChatMessage:
    """Returns a message with marks.

    A call id that would need a mark is replaced by its digest instead, because some templates and formats shorten ids,
    and a mark is random.
    """
    as_is = {"tool_call_id", "tool_calls"} | ({"role"} if one["role"] in COMMON_ROLES else set())
    shown: ChatMessage = {
        name: value if name in as_is else _marked(value, spellings, mark) for name, value in one.items()
    }
    if (id := one.get("tool_call_id")) is not None:
        shown["tool_call_id"] = _safe_id(id, spellings)
    if calls := one.get("tool_calls"):
        shown["tool_calls"] = [
            _marked({name: value for name, value in call.items() if name != "id"}, spellings, mark)
            | {"id": _safe_id(call["id"], spellings)}
            for call in calls
        ]
    return shown


def _safe_id(id: str, spellings: TokenTexts) -> str:
    return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:24] if spellings.occur_in(id) else id

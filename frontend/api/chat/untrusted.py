"""Keeps clients from writing special tokens into a chat (its messages, tools, documents and template variables).

A client may write the spelling of a special token. It is then marked before the template is rendered, and the tokenizer
treats marked spellings as plain text. Only the template's own spellings become special tokens. A chat without such
spellings is not changed.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from frontend.api.chat.call_history import COMMON_ROLES, ChatMessage
from frontend.api.model_context import ModelContext
from frontend.output_parser.formats import Tags
from frontend.output_parser.tool_choice import Function
from frontend.text.spellings import Spellings, new_mark
from frontend.text.tokenizer import AddedTokens


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

    turns: Mapping[str, Spellings]
    rest: Spellings

    @classmethod
    def of(cls, context: ModelContext) -> "Rules":
        return _rules(context.tokenizer.added, context.template.sources, context.style.tags)

    def of_role(self, role: str) -> Spellings:
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
    special = Spellings(added.special)
    trusted = Spellings(added.special.difference(tags))
    return Rules({"user": special, "system": trusted, "assistant": trusted}, Spellings(added.special | written))


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


def _occurs(value: Any, spellings: Spellings) -> bool:
    if isinstance(value, str):
        return spellings.occur_in(value)
    if isinstance(value, dict):
        return _occurs(value.keys(), spellings) or _occurs(value.values(), spellings)
    return isinstance(value, Collection) and any(_occurs(one, spellings) for one in value)


def _marked(value: Any, spellings: Spellings, mark: str) -> Any:
    if isinstance(value, str):
        return spellings.marked(value, mark)
    if isinstance(value, dict):
        return {_marked(name, spellings, mark): _marked(one, spellings, mark) for name, one in value.items()}
    return [_marked(one, spellings, mark) for one in value] if isinstance(value, list | tuple) else value


def _marked_message(one: ChatMessage, spellings: Spellings, mark: str) -> ChatMessage:
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


def _safe_id(id: str, spellings: Spellings) -> str:
    return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:24] if spellings.occur_in(id) else id

"""One grammar of all fields that constrain an answer, structural tags included.

Builds the grammar of a structural tag: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html

A structural tag describes free text with tagged parts as a tree of formats: `const_string`, `json_schema`, `regex`,
`any_text`, `sequence`, `or`, `tag`, `triggered_tags` and `tags_with_separator`. The older form, with `structures` and
`triggers`, is read as `triggered_tags`.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from frontend.errors import Unprocessable
from frontend.schema.base import out_of_range
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.fields import Kind, StructuredOutput

MAX_DEPTH = 32
META = re.compile(r"[\\.+*?()|\[\]{}^$/]")


def structural_tag(value: dict[str, Any] | str, param: str) -> str:
    """Returns the grammar of a structural tag, given as an object or as JSON.

    Raises Unprocessable, which says what is wrong with the structural tag.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _refused(param, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refused(param, "a description is an object")
    root, path = value.get("format"), f"{param}.format"
    if root is None:
        root, path = _older(value, param), param
    rules = _Rules(param)
    rules.lines.insert(0, f"start: {rules.of(root, path, 0)}")
    return grammar_builder.composed(grammar_builder.bounded("\n".join(rules.lines)), param)


def _older(value: dict[str, Any], param: str) -> dict[str, Any]:
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise _refused(param, "it has neither `format` nor `structures`")
    return {"type": "triggered_tags", "triggers": triggers, "tags": [{"type": "tag", **one} for one in structures]}


class _Rules:
    """Collects the rules of a grammar in llguidance's Lark. Each method returns the Lark expression of one format.

    path: of the format, for refusals
    """

    def __init__(self, param: str) -> None:
        self.lines: list[str] = []
        self._param = param
        self._count = 0

    def of(self, form: Any, path: str, depth: int) -> str:
        if not isinstance(form, dict) or depth > MAX_DEPTH:
            raise _refused(self._param, "a format is an object, and not nested too deeply")
        match form:
            case {"type": "const_string", "value": str(text)}:
                return _quoted(text)
            case {"type": "json_schema", "json_schema": dict() | bool() as schema}:
                return self._schema(schema, f"{path}.json_schema")
            case {"type": "regex", "pattern": str(pattern)}:
                grammar_builder.regex(pattern, f"{path}.pattern")  # may match no text
                return self._rule(f"/{grammar_builder.as_lark_regex(pattern, path)}/" if pattern else '""')
            case {"type": "any_text"}:
                return self._rule("/(?s:.*)/")
            case {"type": "sequence", "elements": [*elements]}:
                return f"({' '.join(self._each(elements, f'{path}.elements', depth))})" if elements else '""'
            case {"type": "or", "elements": [_, *_] as elements}:
                return f"({' | '.join(self._each(elements, f'{path}.elements', depth))})"
            case {"type": "tag"}:
                return self._tag(form, path, depth)
            case {"type": "triggered_tags", "triggers": [_, *_] as triggers, "tags": [_, *_] as tags}:
                return self._triggered(form, _texts(triggers, self._param), tags, path, depth)
            case {"type": "tags_with_separator", "tags": [_, *_] as tags, "separator": str(separator)}:
                return self._separated(form, tags, separator, path, depth)
        raise _refused(self._param, f"a format of the type {form.get('type')!r:.40} is unknown or lacks a field")

    def _each(self, forms: Sequence[Any], path: str, depth: int) -> list[str]:
        return [self.of(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(forms)]

    def _schema(self, schema: dict[str, Any] | bool, path: str) -> str:
        known = grammar_builder.enforceable(schema, path, lenient=True)
        return self._rule(f"%json {grammar_builder.embedded(known, path, lenient=True)}")

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{self._count}"
        self._count += 1
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _tag(self, tag: Any, path: str, depth: int, trigger: str = "") -> str:
        """Returns the expression of a tag without `trigger`, with which the tag's `begin` starts."""
        match tag:
            case {"begin": str(begin), "content": {"type": "any_text"}, "end": str(end)} if end:
                body = self._rule(f"/(?s:.*){_escaped(end)}/", lazy=True)
            case {"begin": str(begin), "schema": dict() | bool() as schema, "end": str(end)}:
                body = f"{self._schema(schema, f'{path}.schema')} {_quoted(end)}"
            case {"begin": str(begin), "content": content, "end": str(end)}:
                body = f"{self.of(content, f'{path}.content', depth + 1)} {_quoted(end)}"
            case _:
                raise _refused(self._param, "a tag has `begin`, `content` or `schema`, and `end`")
        return f"({_quoted(begin[len(trigger) :])} {body})"

    def _triggered(self, form: dict[str, Any], triggers: list[str], tags: list[Any], path: str, depth: int) -> str:
        anything = "(?s:.*)"
        path += ".structures" if path == self._param else ".tags"
        ways = []
        for trigger in triggers:
            own = {
                i: tag
                for i, tag in enumerate(tags)
                if isinstance(tag, dict) and str(tag.get("begin")).startswith(trigger)
            }
            if not own:
                raise _refused(self._param, f"no tag begins with the trigger {trigger!r:.80}")
            choices = " | ".join(self._tag(tag, f"{path}[{i}]", depth, trigger) for i, tag in own.items())
            ways.append(f"{self._rule(f'/{anything}{_escaped(trigger)}/', lazy=True)} ({choices})")
        if not all(isinstance(tag, dict) and str(tag.get("begin")).startswith(tuple(triggers)) for tag in tags):
            raise _refused(self._param, "every tag begins with one of the triggers")
        some = self._rule(" | ".join(ways))
        name = f"REST_{self._count}"
        self._count += 1
        self.lines.append(f"{name}: /{anything}/ & ~/{anything}({'|'.join(map(_escaped, triggers))}){anything}/")
        once, least = bool(form.get("stop_after_first")), bool(form.get("at_least_one"))
        if once:
            return some if least else f"({some} | {name})"
        return f"({some}{'+' if least else '*'} {name})"

    def _separated(self, form: dict[str, Any], tags: list[Any], separator: str, path: str, depth: int) -> str:
        one = self._rule(" | ".join(self._tag(tag, f"{path}.tags[{i}]", depth) for i, tag in enumerate(tags)))
        several = one if form.get("stop_after_first") else f"{one} ({_quoted(separator)} {one})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"


def _texts(values: Sequence[Any], param: str) -> list[str]:
    if not all(isinstance(one, str) and one for one in values):
        raise _refused(param, "triggers are texts that are not empty")
    return list(values)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _escaped(text: str) -> str:
    """Returns a regex that matches the text."""
    return META.sub(lambda found: "\\" + found[0], text).replace("\n", r"\n").replace("\r", r"\r")


def _refused(param: str, reason: str) -> Unprocessable:
    return Unprocessable(f"`{param}` cannot be enforced: {reason}", param=param, code="invalid_grammar")


# Structured output: makes one grammar from the request fields that constrain the answer.
#
# `frontend/structured_output/grammar.py` builds grammars from each kind of source. Building and checking run in a
# thread.

MAX_COPIED = 16 << 20  # how many characters of grammar one request may send to the worker


def _json_schema(value: Any, name: str, strict: bool, compact: bool) -> str:
    """Builds the grammar of a JSON schema. value: the schema, or its JSON text"""
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Unprocessable(f"`{name}` is not JSON: {error}", param=name, code="invalid_grammar") from None
    if type(value) not in (dict, bool):
        raise out_of_range(name, value, "a JSON schema")
    return grammar_builder.json_schema(value, name, lenient=not strict, compact=compact)


GRAMMARS: dict[Kind, Callable[[Any, str], str]] = {
    "regex": grammar_builder.regex,
    "choice": grammar_builder.one_of,
    "grammar": grammar_builder.lark,
    "structural_tag": structural_tag,
}


async def grammar(requested: Sequence[StructuredOutput], copies: int = 1) -> str:
    """Builds the requested grammar; empty if none is requested.

    copies: how many sequences each send the grammar to the worker
    Raises Unprocessable for two grammars, for an invalid one, and for one that is too large for that many copies.
    """
    if len(requested) > 1:
        names = " and ".join(f"`{one.param}`" for one in requested)
        raise Unprocessable(
            f"an answer can have one form only: {names} are given", param=requested[1].param, code="conflicting_fields"
        )
    if not requested:
        return ""
    (one,), param = requested, requested[0].param
    if one.kind == "json":
        make = partial(_json_schema, one.value, param, one.strict, one.compact)
    elif one.kind == "json_object":
        make = partial(grammar_builder.json_object, param, compact=one.compact)
    else:
        make = partial(GRAMMARS[one.kind], one.value, param)
    text = await grammar_builder.in_thread(make)
    if len(text) * copies > MAX_COPIED:
        raise Unprocessable(
            f"`{param}` is too large for {copies} answers in one request", param=param, code="out_of_range"
        )
    return text

"""Builds the text of a grammar in llguidance's format from a JSON schema, a regular expression, etc., and checks it.

Knows neither API formats nor tokens; the worker (worker/structured_output) compiles the text against the model's
vocabulary. `param` is the name of the request field that the client sent. If the grammar is refused, each function
raises Unprocessable with this name and llguidance's reason. Checking blocks, because it takes place in a child process
(`grammar_check`): call these functions from an event loop with `in_thread`.

White space in JSON is limited to none, one space, or a line break with up to 24 spaces or 6 tabs. So models may write
`{"a": 1}` or indented JSON, but cannot write blanks forever.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from frontend.errors import Unprocessable
from frontend.request import report_dropped
from frontend.structured_output import grammar_check
from frontend.structured_output import json_schema as json_schema_reader
from frontend.structured_output.json_schema import HANDLERS, Supported, shown_path
from frontend.structured_output.keywords import BY_NAME, LISTS, Path, References
from frontend.structured_output.productive_rules import Rules, may_force, read, terminals, unproductive
from shared.sandbox import Killed, Lost, Raised, TookTooLong

# Finds the part of a schema at which a compiler takes offence, by giving it the parts one by one.

MAX_TRIALS = 200  # of one search
DEFINITIONS = ("$defs", "definitions")
INNER = ("items", "additionalProperties", "contains", "then", "else", "if", "not", "unevaluatedProperties",
         "unevaluatedItems", "additionalItems")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """path: of the subschema or, if `removable`, of its keyword without which the subschema would be accepted"""

    path: Path
    reason: str
    removable: bool


def at_fault(
    schema: dict[str, Any] | bool, param: str, error: Callable[[dict[str, Any]], str], *, lenient: bool
) -> Fault | None:
    """Returns the innermost part that is refused; None if each part alone is accepted.

    error: returns why a schema in its enforceable form is refused, or ""
    """
    trials = iter(range(MAX_TRIALS))

    def reason_of(whole: dict[str, Any] | bool, path: Path) -> str:
        if next(trials, None) is None:
            return ""
        try:
            return error(json_schema_reader.supported(whole, param, lenient=lenient, at=path).schema)
        except Unprocessable:  # a part that allows nothing may be optional
            return ""

    path: Path = ()
    reason = reason_of(schema, path)
    if not reason:
        return None
    seen = {path}
    references = References(schema)
    node: Any = schema
    going = True
    while going:
        going = False
        for inner, one in _parts(node, path, references):
            if inner not in seen and (found := reason_of(schema, inner)):
                seen.add(inner)
                path, node, reason, going = inner, one, found, True
                break
    if isinstance(node, dict) and not _allows_nothing(reason):
        for key in [key for key in reversed(node) if key in HANDLERS]:
            if not reason_of(without(schema, (*path, key)), path):
                return Fault((*path, key), reason, next(trials, None) is not None)
    return Fault(path, reason, False)


def without(schema: Any, path: Path) -> Any:
    """Returns a copy of a schema that lacks what is at a path."""
    changed = copy(schema)
    if path[1:]:
        changed[path[0]] = without(schema[path[0]], path[1:])
    else:
        del changed[path[0]]
    return changed


def _parts(node: Any, path: Path, references: References) -> Iterator[tuple[Path, Any]]:
    """Yields the subschemas that a schema uses, with their paths."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in BY_NAME and key not in DEFINITIONS and isinstance(value, dict):
            yield from (((*path, key, name), one) for name, one in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from (((*path, key, i), one) for i, one in enumerate(value))
        elif key in INNER and isinstance(value, dict):
            yield (*path, key), value
        elif key == "$ref" and isinstance(value, str) and (found := references.find(value, references.whole)):
            yield found[0], found[1]


def _allows_nothing(reason: str) -> bool:
    return "Unsatisfiable" in reason


S = TypeVar("S", bound=dict[str, Any] | bool)

MAX_BYTES = 256 * 1024  # the longest text of one grammar
MAX_PARTS = 4 * MAX_BYTES  # the longest texts of all its terminals that are checked one by one
MAX_REASON = 400
MAX_DROPPED = 16  # how many keywords of one schema llguidance may refuse before the schema is refused
NONE: Mapping[str, str] = MappingProxyType({})
WHITE_SPACE = r"( |\n( {0,24}|\t{0,6}))"
NO_FORCING = '%llguidance {"no_forcing": true}'
GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
COMPACT = {"whitespace_flexible": False, "lenient": False}


def json_object(param: str = "response_format", *, compact: bool = False) -> str:
    """Builds the grammar of any JSON object."""
    return json_schema({"type": "object"}, param, compact=compact)


def json_schema(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False, compact: bool = False) -> str:
    """Builds the grammar of the JSON that a schema allows. compact: without white space between its parts

    Raises Unprocessable, whose `param` is the path within the schema. A keyword that a grammar cannot enforce is
    refused or, if `lenient`, dropped and reported (`report_dropped`). A schema that allows nothing is refused.
    """
    schema = enforceable(schema, param, lenient=lenient)
    return _of_schema(supported(schema, param, lenient=lenient).schema, param, compact=compact)


def enforceable(schema: S, param: str, *, lenient: bool = False) -> S:
    """Returns a schema without the keywords that only llguidance finds out it cannot enforce (they are few: patterns of
    names that overlap, numbers of properties, …). Raises Unprocessable as `json_schema` does."""
    dropped: dict[str, str] = {}
    for _ in range(MAX_DROPPED):
        made = supported(schema, param, lenient=lenient)
        reason = _error(_of_schema(made.schema, param), param)
        if not reason:
            break
        if reason.startswith(grammar_check.CRASHED):  # each part that crashes would cost another child
            raise _refused(param, reason)
        found = at_fault(schema, param, lambda one: _error(_of_schema(one, param), param), lenient=lenient)
        path, reason = (found.path, found.reason) if found else ((), reason)
        shown = shown_path(param, path)
        if not lenient or found is None or not found.removable:
            raise _refused(shown, reason)
        schema, dropped[shown] = without(schema, path), reason
    else:
        raise _refused(param, "too many of its keywords cannot be enforced")
    report_dropped(dropped)
    return schema


def regex(pattern: str, param: str) -> str:
    """Builds the grammar of text that a regular expression matches as a whole.

    pattern: a regular expression in Rust's syntax, without look-around and back-references
    """
    start = f"start: /{as_lark_regex(pattern, param)}/" if pattern else 'start: ""'
    return _checked(_of_lark(start), param, compiles=True)


def as_lark_regex(pattern: str, param: str) -> str:
    """Returns a regular expression as Lark writes it between slashes, without checking it."""
    from llguidance import regex_to_lark

    _check_text(pattern, param)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # the library would drop the last backslash
        raise _refused(param, "it ends in a lone backslash")
    return str(regex_to_lark(pattern, ""))


def one_of(options: Sequence[str], param: str) -> str:
    """Builds the grammar that allows exactly one of these texts."""
    if not options:
        raise _refused(param, "there is nothing to choose from")
    texts = " | ".join(_json(option, param) for option in options if option)
    # An empty text cannot be a terminal. The others form one terminal: llguidance fails with over 2000 alternatives.
    start = "start: CHOICE" + (' | ""' if "" in options else "") if texts else 'start: ""'
    return _checked(_of_lark(f"{start}\nCHOICE: {texts}" if texts else start), param)


def lark(text: str, param: str) -> str:
    """Builds a grammar from llguidance's Lark, or from llama.cpp's GBNF (`root ::= …`), which it translates to Lark."""
    _check_text(text, param)
    try:
        text = grammar_check.translated(text)
    except Lost as error:
        raise _refused(param, str(error)) from None
    except Raised as error:  # the library's parser may raise anything
        raise _refused(param, f"neither Lark nor GBNF: {str(error).partition(': ')[2]}") from None
    rules = read(text)
    checked = _checked(_of_lark(_bounded(text, rules)), param, compiles=True)
    if endless := unproductive(rules):
        raise _refused(param, f"no text of these rules ends: {_listed(endless)}")
    try:
        parts = terminals(rules, MAX_PARTS)
    except ValueError as error:
        raise _refused(param, str(error)) from None
    if empty := _without_text(parts):
        raise _refused(param, f"no text matches these parts: {_listed(empty)}")
    return checked


def bounded(lark: str) -> str:
    """Returns a Lark grammar in which llguidance forces no tokens where it could look ahead for ever (`may_force`)."""
    return _bounded(lark, read(lark))


def _bounded(lark: str, rules: Rules) -> str:
    return f"{lark}\n{NO_FORCING}" if may_force(rules) else lark


def _without_text(parts: dict[str, str]) -> list[str]:
    """Returns the names of those grammars that allow no text."""
    if not parts:
        return []
    empty = grammar_check.without_text(tuple(_of_lark(one) for one in parts.values()))
    return [name for i, name in enumerate(parts) if i in empty]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def composed(text: str, param: str, answer: str = "", parts: Mapping[str, str] = NONE) -> str:
    """Builds a grammar from Lark that we wrote ourselves. There, `@answer` means the grammar `answer`, and `@NAME` a
    text of `parts`, which is Lark, too."""
    entries = [f'{{"lark_grammar":{_json(text)}}}'] if answer or parts else []
    if not entries:
        return _checked(_of_lark(text), param)
    if answer:
        (part,) = msgspec.json.decode(answer)["grammars"]
        entries.append(_json({**part, "name": "answer"}))
    entries += [_json({"lark_grammar": one, "name": name}) for name, one in parts.items()]
    return _checked(_grammars(",".join(entries)), param)


def lark_text(made: str) -> str:
    """Returns the Lark of a grammar that `lark` built."""
    return str(msgspec.json.decode(made)["grammars"][0]["lark_grammar"])


def embedded(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False) -> str:
    """Returns a schema for `%json <schema>` in Lark, with limited white space and only with enforceable keywords.

    Does not let llguidance check it. Raises Unprocessable as `json_schema` does.
    """
    return guided(supported(schema, param, lenient=lenient).schema, param)


def supported(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False) -> Supported:
    """Returns the enforceable form of a schema, and reports the keywords that were dropped. Raises Unprocessable."""
    made = _supported(_Source(_json(schema, param), schema), param, lenient)
    report_dropped(made.dropped)
    return made


def guided(schema: dict[str, Any], param: str, *, compact: bool = False) -> str:
    """Returns the enforceable form of a schema as JSON, with limited white space, or with none if `compact`."""
    return _json({**schema, "x-guidance": COMPACT if compact else GUIDANCE}, param)


async def in_thread(make: Callable[[], str]) -> str:
    """Calls one of the functions above in a thread, when the tenant's turn comes (see `grammar_check.in_turn`)."""
    return await grammar_check.in_turn(make)


@dataclass(frozen=True, slots=True)
class _Source:
    """A schema as a key of a cache: equal schemas have the same text."""

    text: str
    schema: dict[str, Any] | bool = field(compare=False)


@lru_cache(maxsize=128)
def _supported(source: _Source, param: str, lenient: bool) -> Supported:
    try:
        return json_schema_reader.supported(source.schema, param, lenient=lenient)
    except RecursionError as error:
        raise _refused(param, str(error)) from None


def _json(value: Any, param: str = "") -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(param, str(error)) from None


def _grammars(entry: str) -> str:
    return f'{{"grammars":[{entry}]}}'


def _of_lark(text: str) -> str:
    return _grammars(f'{{"lark_grammar":{_json(text)}}}')


def _of_schema(schema: dict[str, Any], param: str, *, compact: bool = False) -> str:
    return _grammars(f'{{"json_schema":{guided(schema, param, compact=compact)}}}')


def _checked(grammar: str, param: str, *, compiles: bool = False) -> str:
    if reason := _error(grammar, param, compiles=compiles):
        raise _refused(param, reason)
    return grammar


def _error(grammar: str, param: str, *, compiles: bool = False) -> str:
    """Returns llguidance's reason against a grammar, or "". Raises Unprocessable if it cannot be checked in time."""
    _check_text(grammar, param)
    try:
        return grammar_check.error(grammar, compiles)
    except (TookTooLong, Killed) as failure:
        raise _refused(param, str(failure)) from None


def _check_text(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused(param, "it is not valid Unicode") from None
    if size > MAX_BYTES:
        raise Unprocessable(f"`{param}` is larger than {MAX_BYTES} bytes", param=param, code="invalid_grammar")


def _refused(param: str, reason: str) -> Unprocessable:
    reason = reason.strip().removeprefix(grammar_check.CRASHED)
    shown = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
    return Unprocessable(f"`{param}` cannot be enforced: {shown}", param=param, code="invalid_grammar")

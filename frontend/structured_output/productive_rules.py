"""Finds what an answer could enter and never leave, in Lark grammars and in JSON schemas, before they are used.

In a Lark grammar these are rules whose texts never end, and terminals that match no text. A rule is productive if one
of its alternatives has only productive parts. Here, terminals count as productive: Lark allows no recursion among them,
and only llguidance knows whether one matches a text (`terminals`). This module says nothing of a grammar whose notation
it does not know.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from typing import Any

from frontend.structured_output.keywords import Path

TOKENS = re.compile(
    r"""(?P<skipped>[ \t\r\n]+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<directive>^[ \t]*%(?:ignore|import|declare|llguidance)\b[^\n]*)
    |^[ \t]*[?!]*(?P<defined>[A-Za-z_](?:\w|-(?!>))*)(?:\.-?\d+)?(?P<options>\[[^\]\n]*\])?[ \t]*:(?!:)
    |(?P<json>%(?:json|regex)\b\s*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"i?(?:\.\."(?:[^"\\\n]|\\.)*")?|/(?:[^/\\\n]|\\.)+/[imslux]*|<[^>\n]*>|@\w+)
    |(?P<name>[A-Za-z_](?:\w|-(?!>))*)
    |(?P<optional>[?*]|~\s*0\b(?:\s*\.\.\s*\d+)?|\{\s*0?\s*,\s*\d*\s*\})
    |(?P<repeated>\+|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|()\[\]&~])""",
    re.VERBOSE | re.MULTILINE,
)
_START = "start"
# What a regular expression that matches no text has: a class that leaves characters out.
_NARROW = re.compile(r"\[\^|&&|--|~~|\\P|\\[DSW]")
# A regular expression, piece by piece, and classes that certainly match characters with several first or last bytes.
_PIECES = re.compile(
    r"""(?P<class>\[(?:[^\]\\]|\\.)*\]|\.|\\[dws]|\\p\{[^}]*\})
    |(?P<opening>\((?:\?(?:[a-zA-Z-]*:|P?<\w+>|[a-zA-Z-]+(?=\))))?)
    |(?P<closing>\))|(?P<bound>\*|\+|\{\d*,\}|\{0)|(?P<one>\\(?:[xu](?:\{[^}]*\}|[0-9A-Fa-f]+)|.)|.)""",
    re.VERBOSE | re.DOTALL,
)
_WIDE = re.compile(r"""\.|\\[dws]|\\p\{[^}]*\}|\[\^(?:[^\]\\\[&~-]|\\[^BDWSPpxu])+-?\]""")
_LISTED = re.compile(r"\[([^\]\\\[&~^-]|\\[dwstnrf\\]|[0-9A-Za-z]-[0-9A-Za-z])+-?\]")


@dataclass(slots=True)
class _Rule:
    """A rule, or a group in brackets, which is a rule without a name of its own."""

    alternatives: list[list[str]] = field(default_factory=lambda: [[]])  # the names of rules that each needs
    named: set[str] = field(default_factory=set)  # the names of all rules in it, needed or not
    text: str = ""  # the definition, of a rule with a name
    regexes: set[str] = field(default_factory=set)  # between slashes
    intersects: bool = False  # whether a `&` or `~` stands in it
    repeats: bool = False  # whether a part of it is repeated without a limit


@dataclass(frozen=True, slots=True)
class Rules:
    """What `read` finds in a text.

    by_name: the rules and groups (the name of a group is a number), in order; none for a notation that is not known
    imports: the lines that import terminals
    """

    by_name: dict[str, _Rule] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)


def read(grammar: str) -> Rules:
    """Reads a text in llguidance's Lark. Takes about 1.5 µs a token."""
    rules: dict[str, _Rule] = {}
    imports: list[str] = []
    open_rules = [_Rule()]  # the rule that is being read, and its groups that are open
    at = begin = 0
    while at < len(grammar):
        token = TOKENS.match(grammar, at)
        if token is None:
            return Rules()
        before, at, text, rule = at, token.end(), token.group().strip(), open_rules[-1]
        if token.lastgroup in ("defined", "options", "directive"):
            open_rules[0].text = grammar[begin:before].strip()
            begin = before
        match token.lastgroup:
            case "defined" | "options":
                rule = rules[token["defined"]] = _Rule()
                open_rules = [rule]
            case "directive":
                open_rules = [_Rule()]
                if text.startswith("%import"):
                    imports.append(text)
            case "json":
                try:
                    at = JSONDecoder().raw_decode(grammar, at)[1]
                except (JSONDecodeError, RecursionError):
                    return Rules()
                rule.alternatives[-1].append("")
            case "literal":
                rule.alternatives[-1].append("")  # needs nothing, and may be optional
                if text.startswith("/"):
                    rule.regexes.add(text)
            case "name":
                rule.alternatives[-1].append(text)
                rule.named.add(text)
            case "optional":
                rule.alternatives[-1][-1:] = [""]
                rule.repeats |= text == "*" or text.replace(" ", "").endswith(",}")
            case "repeated":
                rule.repeats |= text == "+" or text.replace(" ", "").endswith(",}")
            case "sign" if text == "|":
                rule.alternatives.append([])
            case "sign" if text in "&~":
                rule.intersects = True
            case "sign" if text in "([":
                group = str(len(rules))
                rule.alternatives[-1].append(group)
                rule.named.add(group)
                rules[group] = _Rule()
                open_rules.append(rules[group])
            case "sign" if text in ")]":
                if len(open_rules) == 1:
                    return Rules()
                open_rules.pop()
                if text == "]":
                    open_rules[-1].alternatives[-1][-1:] = [""]
    open_rules[0].text = grammar[begin:].strip()
    return Rules(rules, imports)


def unproductive(grammar: Rules) -> list[str]:
    """Returns the names of rules that `start` can reach and that allow no text that ends, in the grammar's order."""
    rules = grammar.by_name
    done = _productive(rules)
    reached = _reached(rules, _START)
    return [name for name in rules if name in reached and name not in done and not name.isdigit()]


def terminals(grammar: Rules, most: int) -> dict[str, str]:
    """Returns the terminals and regular expressions that `start` can reach and that may match no text.

    The keys are names, or expressions between slashes; each value is a grammar of the texts of that terminal alone.
    Left out are those without `&`, `~` and classes that leave characters out, since they match some text. Raises
    ValueError if these grammars have more than `most` characters: each repeats the terminals that it is made of.
    """
    rules = grammar.by_name
    doubtful = _users(
        rules, [name for name, rule in rules.items() if rule.intersects or any(map(_is_narrow, rule.regexes))]
    )
    found: dict[str, str] = {}
    for name in _reached(rules, _START):
        if not _is_terminal(name):
            found |= {one: f"{_START}: {one}" for one in rules[name].regexes if _is_narrow(one)}
        elif name in doubtful:
            needed = [rules[one].text for one in _reached(rules, name)]
            found[name] = "\n".join([f"{_START}: {name}", *dict.fromkeys(filter(None, needed)), *grammar.imports])
            most -= len(found[name])
            if most < 0:
                raise ValueError("too many of its terminals are made of long ones")
    return found


def may_force(grammar: Rules) -> bool:
    """Whether a terminal may allow one character again and again without an end, as `/a+/` does before `"a"`.

    llguidance looks ahead as long as only one character is allowed, and would do so forever.
    """
    rules = grammar.by_name
    if not rules:
        return True
    of_terminals = _reached(rules, *filter(_is_terminal, rules))
    return any(any(map(regex_may_force, rule.regexes)) for rule in rules.values()) or any(
        rules[name].intersects or rules[name].repeats for name in of_terminals
    )


def regex_may_force(regex: str) -> bool:
    """Whether a part of a regular expression that may be a single character is repeated without a limit.

    A group with a wide class does not count: wherever the group begins again, several characters are allowed.
    """
    wide = [False]  # for the whole expression and each open group: whether a wide class stands in it
    last = repeats = odd = False
    for piece in _PIECES.finditer(regex):
        text = piece.group()
        match piece.lastgroup:
            case "opening":
                wide.append(False)
            case "closing":
                last = wide.pop() if len(wide) > 1 else False
                wide[-1] |= last
            case "bound" if text == "{0":  # the part before it may be left out entirely
                odd = True
            case "bound":
                repeats = True
                if not last:
                    return True
            case "class":
                last = _is_wide(text)
                odd |= (not last and text.startswith(("[^", "[["))) or "&&" in text
                wide[-1] |= last
            case _:
                last = False
    return repeats and odd


def _is_wide(text: str) -> bool:
    """Whether a class certainly matches characters that differ in a byte."""
    if _WIDE.fullmatch(text):
        return True
    if not _LISTED.fullmatch(text):
        return False
    if re.search(r"\\[dws]", text) or any(low != high for low, high in re.findall(r"(\w)-(\w)", text)):
        return True
    return len(set(re.findall(r"\\.|[^\[\]\\]", text))) > 1


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_narrow(regex: str) -> bool:
    return _NARROW.search(regex) is not None


def _users(rules: dict[str, _Rule], used: list[str]) -> set[str]:
    """Returns the names of the rules and groups that need or may need one of those `used`, themselves included."""
    by = defaultdict[str, list[str]](list)
    for name, rule in rules.items():
        for part in rule.named:
            by[part].append(name)
    users, waiting = set[str](), list(used)
    while waiting:
        if (name := waiting.pop()) not in users:
            users.add(name)
            waiting.extend(by[name])
    return users


def _reached(rules: dict[str, _Rule], *starts: str) -> dict[str, None]:
    """Returns the names of the rules and groups that these need or may need, themselves included, in one order."""
    reached, waiting = dict[str, None](), list(starts)
    while waiting:
        if (name := waiting.pop()) in rules and name not in reached:
            reached[name] = None
            waiting.extend(sorted(rules[name].named, reverse=True))
    return reached


def _productive(rules: dict[str, _Rule]) -> set[str]:
    """Returns the names of productive rules. Takes time in proportion to the grammar's length."""
    uses = defaultdict[str, list[tuple[str, set[str]]]](list)  # by a rule's name: alternatives that need it, and whose
    done, waiting = set[str](), list[str]()
    for name, rule in rules.items():
        for alternative in rule.alternatives:
            missing = {one for one in alternative if one in rules}
            for one in missing:
                uses[one].append((name, missing))
            if not missing:
                waiting.append(name)
    while waiting:
        if (name := waiting.pop()) in done:
            continue
        done.add(name)
        for user, missing in uses[name]:
            missing.discard(name)
            if not missing:
                waiting.append(user)
    return done


# Finds schemas that allow no value, or only values that never end, before a grammar is made of them.


@dataclass(slots=True)
class _Need:
    """Something without which the schema `of` (an id) allows no value."""

    of: int
    met: bool = False


class Productive:
    """Which parts of a schema allow a value. Takes time in proportion to the schema, whatever refers to what.

    definitions: the schemas by name, in their enforceable form
    paths, sources: of the parts of all schemas (see `json_schema.Reader`)
    """

    def __init__(
        self, definitions: Mapping[str, Any], paths: Mapping[int, Path], sources: Mapping[tuple[int, int], Path]
    ) -> None:
        self._definitions = definitions
        self._paths, self._sources = paths, sources
        self._unmet: dict[int, int] = {}  # by the id of a schema: how many of its needs are not known to be met
        self._helps = defaultdict[int, list[_Need]](list)  # by the id of a schema: the needs that it meets

    def possible(self, schema: Any) -> bool:
        """Whether a schema allows a value, as far as types, lists of values, and required parts show."""
        if isinstance(schema, bool):
            return schema
        if id(schema) not in self._unmet:
            self._read(schema)
        return not self._unmet[id(schema)]

    def _read(self, schema: dict[str, Any]) -> None:
        """Counts the needs of a schema and of all that it refers to, then strikes out those that are met."""
        waiting, possible = [schema], list[int]()
        while waiting:
            if id(one := waiting.pop()) in self._unmet:
                continue
            needs = [ways for _, ways in self._needs(one) if not any(map(self._is_known, ways))]
            for ways in needs:
                need = _Need(id(one))
                for way in ways:
                    if way is not False:
                        self._helps[id(way)].append(need)
                        waiting.append(way)
            self._unmet[id(one)] = len(needs)
            if not needs:
                possible.append(id(one))
        while possible:
            for need in self._helps[possible.pop()]:
                if not need.met:
                    need.met = True
                    self._unmet[need.of] -= 1
                    if not self._unmet[need.of]:
                        possible.append(need.of)

    def _is_known(self, schema: Any) -> bool:
        return schema is True or self._unmet.get(id(schema)) == 0

    def culprit(self, schema: Any, path: Path) -> Path:
        """Returns the path of the part for which a schema allows no value. path: of the schema itself"""
        seen = set()
        while isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            path = self._paths.get(id(schema), path)
            keys, inner = self._culprit(schema) or ((), None)
            source = self._sources.get((id(schema), keys[1])) if keys[:1] == ("allOf",) else None
            path = (*path, *keys) if source is None else source
            schema = inner if source is None or id(inner) in self._paths else None
        return path

    def _culprit(self, schema: dict[str, Any]) -> tuple[Path, Any] | None:
        """Returns a part of a schema that allows no value although it must, and its path; None if there is none."""
        for keys, ways in self._needs(schema):
            if not any(map(self.possible, ways)):
                return keys, ways[0] if len(ways) == 1 and keys[:1] not in (("anyOf",), ("required",)) else None
        return None

    def _needs(self, schema: dict[str, Any]) -> Iterator[tuple[Path, Sequence[Any]]]:
        """Yields what a schema needs to allow a value: the path within, and parts of which one must be possible."""
        if (reference := schema.get("$ref")) is not None:
            yield (), [self._definitions[reference.removeprefix("#/$defs/")]]
        for i, one in enumerate(schema.get("allOf", ())):
            yield ("allOf", i), [one]
        if (ways := schema.get("anyOf")) is not None:
            yield ("anyOf",), ways
        if schema.get("type") == "object":
            properties = schema.get("properties", {})
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            for name in schema.get("required", ()):
                yield (("properties", name), [properties[name]]) if name in properties else (("required",), [others])
        if schema.get("type") == "array":
            first = schema.get("prefixItems", ())
            for i in range(min(schema.get("minItems", 0), len(first) + 1)):
                yield (("prefixItems", i), [first[i]]) if i < len(first) else (("items",), [schema.get("items", True)])

"""The grammar rules for a call's arguments, in the form of each format. They allow what the function's schema allows.

Parameters stand in the schema's order. Where a form writes a string without JSON's quotes, lengths and lists of values
are enforced; other keywords for strings are refused for a strict function, and not enforced for other functions.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from frontend.output_parser.model_format import INPUT, Function, Kind, kind_of, resolved, types_of
from frontend.output_parser.tool_syntax import BARE_QUOTE, Form, ParameterTags, ToolCallSyntax
from frontend.request import report_dropped
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.json_schema import refused, shown_path

# Writes parts of a grammar in llguidance's Lark, where a special token is written as its id.

W = r"[ \n]{0,2}"  # as much white space as a model needs between the words of a call
ANY = r"(?s:.*)"
MEANS_MORE = re.compile(r"""[\\.+*?()|\[\]{}^$#&\-~/"]""")
Specials = Mapping[str, int]  # the ids of special tokens, by their spelling


def escaped(text: str) -> str:
    """Returns a regex that matches only this text."""
    return MEANS_MORE.sub(r"\\\g<0>", text).replace("\n", r"\n")


def either(texts: Iterable[str]) -> str:
    """Returns a regex that matches any one of these texts."""
    return f"({'|'.join(map(escaped, texts))})"


def words(text: str, specials: Specials, name: str = "", before: str = W, after: str = "") -> str:
    """Returns the sequence of a syntax's words (`tool_syntax`), with white space between them.

    name: the function's name
    before, after: regexes of the texts before and after the words
    """
    parts: list[str] = []
    regex = ""
    for word in text.split():
        token, rest = _split(word, specials)
        regex += W if parts or regex else before
        if token:
            parts += [*_lexeme(regex), token]
            regex = ""
        regex += _filled(rest, name)
    return " ".join([*parts, *_lexeme(regex + after)])


def spaced(text: str, names: str) -> str:
    """Returns a regex of a sequence of a syntax's words, with any white space where the text has a space.

    names: a regex of the functions' names
    """
    parts = {"NAME": names, "INDEX": "[0-9]{1,4}"}
    regexes = ["".join(parts.get(part, escaped(part)) for part in _slots(word)) for word in text.split()]
    return r"\s*".join(regexes)


def _split(word: str, specials: Specials) -> tuple[str, str]:
    """Splits a special token off the beginning of a word."""
    for spelling, id in specials.items():
        if word.startswith(spelling):
            return f"<[{id}]>", word[len(spelling) :]
    return "", word


def _filled(word: str, name: str) -> str:
    return "".join({"NAME": name, "INDEX": "[0-9]{1,4}"}.get(part, escaped(part)) for part in _slots(word))


def _slots(word: str) -> list[str]:
    return re.split("(NAME|INDEX)", word)


def _lexeme(regex: str) -> list[str]:
    return [f"/{regex}/"] if regex else []


def joined(parts: Iterable[str], specials: Specials, before: str = "") -> str:
    """Returns the expression that matches these texts, one directly after the other.

    before: a regex of the text before them
    """
    found: list[str] = []
    regex = before
    for part in parts:
        token, rest = _split(part, specials)
        if token:
            found += [*_lexeme(regex), token]
            regex = ""
        regex += escaped(rest)
    return " ".join([*found, *_lexeme(regex)])


class Rules:
    """Collects the rules of a grammar."""

    def __init__(self, specials: Specials) -> None:
        self.specials = specials
        self.lines: list[str] = []
        self._known: dict[str, str] = {}

    def add(self, prefix: str, body: str, options: str = "") -> str:
        """Adds a rule with a new name that begins with `prefix`; returns the name. If the same rule is there already,
        adds nothing and returns the name of that rule."""
        key = f"{prefix.isupper()}{options} {body}"
        if key not in self._known:
            name = f"{prefix}_{len(self._known)}"
            self._known[key] = name
            self.lines.append(f"{name}{options}: {body}")
        return self._known[key]

    def name(self, prefix: str) -> str:
        """Returns a new name, for a rule that is written later."""
        return self._known.setdefault(f"{prefix} {len(self._known)}", f"{prefix}_{len(self._known)}")

    def until(self, tag: str, text: str = ANY) -> str:
        """Returns the expression that matches a text up to the first `tag`, including the tag.

        text: a regex of the text
        """
        if tag in self.specials:
            return f"{self.add('TEXT', f'/{text}/')} <[{self.specials[tag]}]>"
        end = escaped(tag)
        if text == ANY:
            return self.add("text", f"/{text}{end}/", "[lazy]")
        terminal = self.add("TEXT", f"/{text}{end}/ & ~/{ANY}{end}(?s:.+)/")
        return self.add("text", terminal, "[lazy]")


DEFINITIONS = ("$defs", "definitions")
KNOWN_OF_STRINGS = {
    "type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples", "$comment",
    "anyOf", "oneOf", "$ref", "nullable", *DEFINITIONS,
}  # fmt: skip
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "patternProperties", "$ref")
PYTHON_WAYS = {"boolean": '"True" | "False"', "null": '"None"'}
STRING_IN_PYTHON = r"'([^'\\\n]|\\['\\ntr])*'"


def argument_rules(syntax: ToolCallSyntax, function: Function, rules: Rules) -> str:
    """Adds the rules for a function's arguments; returns the expression that matches them.

    Raises Unprocessable if the schema of a strict function cannot be enforced.
    """
    writer = _Writer(function, rules)
    match syntax.form:
        case Form.TAGS if syntax.tags is not None:
            return writer.tagged(syntax.tags)
        case Form.PYTHON:
            return writer.python()
        case Form.BARE:
            return writer.bare()
    return writer.whole()


def object_of_input(part: str) -> str:
    """Returns the expression of an object whose only member is the input of a custom tool, a text of `@part`."""
    space = f"{grammar_builder.WHITE_SPACE}?"
    return rf'/\{{{space}"{INPUT}"{space}:{space}"/ @{part} /"{space}\}}/'


@dataclass(frozen=True, slots=True)
class _Member:
    """A named member of an object: its rule in the grammar, and whether an object must have it."""

    rule: str
    required: bool


class _Writer:
    """Writes the rules for one function."""

    def __init__(self, function: Function, rules: Rules) -> None:
        self._function = function
        self._rules = rules
        found = grammar_builder.supported(function.parameters, function.param, lenient=not function.strict)
        self._root = found.schema
        self._paths = found.paths
        self._references: dict[str, str] = {}  # reference → the name of its rule, which is written or begun

    def json(self, schema: Any, root: bool = True) -> str:
        """Adds a rule for JSON; returns its name. root: whether `schema` may use the function's definitions"""
        if root and isinstance(schema, dict):
            schema = {**{key: self._root[key] for key in DEFINITIONS if key in self._root}, **schema}
        schema = schema if isinstance(schema, dict) else {"enum": []} if schema is False else {}
        return self._rules.add("json", f"%json {grammar_builder.guided(schema, self._function.param)}")

    def whole(self) -> str:
        """Returns the rule of arguments that are one JSON object."""
        if self._function.custom is not None and self._function.custom.part:
            return object_of_input(self._function.custom.part)
        return self.json(self._root, root=False)

    # rules of parameters between tags

    def tagged(self, tags: ParameterTags) -> str:
        """Returns the rule of parameters between tags."""
        self._check_top()

        def named(name: str, schema: Any) -> str:
            value = self._tagged_value(schema, tags)
            return f"{joined((tags.key[0], name, tags.key[1]), self._rules.specials, W)} {value}"

        parts = [one.rule if one.required else f"({one.rule})?" for one in self._members(self._root, named)]
        if self._open_ended(self._root):
            name = self._rules.add("NAME", rf'/[^<>="\s]+/{self._other_names(self._root)}')
            key = f"{joined(tags.key[:1], self._rules.specials, W)} {name} {joined(tags.key[1:], self._rules.specials)}"
            parts.append(f"({key} {self._tagged_value({}, tags)})*")
        return " ".join([*parts, joined((tags.end,), self._rules.specials, W)])

    def _tagged_value(self, schema: Any, tags: ParameterTags) -> str:
        opening = joined(tags.value[:1], self._rules.specials, W) + " " if tags.value[0] else ""
        return opening + (r"/\n/ " if tags.lines else "") + self._alternatives(schema, tags)

    def _alternatives(self, schema: Any, tags: ParameterTags) -> str:
        """Returns the expression that matches a value and the tag after it."""
        plain = resolved(schema, self._root)
        line, end = r"\n" if tags.lines else "", tags.value[1]
        closing = joined(("\n" if tags.lines else "", end), self._rules.specials)
        inner = [one for key in ("anyOf", "oneOf") for one in plain.get(key) or ()]
        if (values := _values(plain)) is not None:
            texts = either(one if isinstance(one, str) else _json_text(one) for one in values)
            return f"/{texts}/ {closing}"
        match kind_of(schema, self._root):
            case Kind.JSON:
                return f"{self.json(schema)} {closing}"
            case Kind.EITHER if inner and not any(map(self._is_free, inner)):
                return f"({' | '.join(self._alternatives(one, tags) for one in inner)})"
        self._check_string(plain)
        length = _length(plain)
        return self._rules.until(end, f"{length}{line}" if length else ANY)

    def _is_free(self, schema: Any) -> bool:
        """Whether a value may be any string."""
        plain = resolved(schema, self._root)
        return kind_of(plain, self._root) is not Kind.JSON and _values(plain) is None

    # rules of Python's keyword arguments and of objects without quotes

    def python(self) -> str:
        """Returns the rule of Python's keyword arguments. A value is JSON, which the parser reads as a literal, or is
        written with Python's own words and strings."""
        self._check_top()

        def named(name: str, schema: Any) -> str:
            quoted = resolved(schema, self._root)
            free = self._is_free(schema) and kind_of(quoted, self._root) is Kind.TEXT and not _length(quoted)
            types = types_of(schema, self._root) if _values(quoted) is None else frozenset()
            ways = [self.json(schema), *[words for one, words in PYTHON_WAYS.items() if one in types]]
            ways += [f"/{STRING_IN_PYTHON}/"] * (free and KNOWN_OF_STRINGS.issuperset(quoted))
            return f"/{escaped(name)} ?= ?/ ({' | '.join(ways)})"

        other = None
        if self._open_ended(self._root):
            name = self._rules.add("NAME", rf"/[A-Za-z_]\w*/{self._other_names(self._root)}")
            other = f'{name} "=" {self.json({})}'
        return f'"(" {self._listed(self._members(self._root, named), other, "/, ?/")} ")"'

    # for Gemma's objects

    def bare(self) -> str:
        """Returns the rule of an object whose names have no quotes."""
        self._check_top()
        return self._bare_object(self._root)

    def _bare_object(self, schema: Mapping[str, Any]) -> str:
        def named(name: str, value: Any) -> str:
            return f"/{escaped(name)}:/ {self._bare_value(value)}"

        other = None
        if self._open_ended(schema):
            name = self._rules.add("NAME", rf"/[A-Za-z_]\w*/{self._other_names(schema)}")
            other = f'{name} ":" {self._bare_value({})}'
        return f'"{{" {self._listed(self._members(schema, named), other, "/, ?/")} "}}"'

    def _bare_value(self, schema: Any) -> str:
        """Returns the rule of a value. A reference becomes a rule of its own, as it may be recursive."""
        reference = schema.get("$ref", "") if isinstance(schema, dict) else ""
        if not reference:
            return self._rules.add("value", self._bare_alternatives(resolved(schema, self._root)))
        if reference not in self._references:
            name = self._references[reference] = self._rules.name("value")
            self._rules.lines.append(f"{name}: {self._bare_alternatives(resolved(schema, self._root))}")
        return self._references[reference]

    def _bare_alternatives(self, schema: Mapping[str, Any]) -> str:
        if (values := _values(schema)) is not None:
            return " | ".join(self._bare_constant(one) for one in values)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return " | ".join(self._bare_value(one) for one in schema[key])
        types = schema.get("type")
        if isinstance(types, list):
            return " | ".join(self._bare_type(one, schema) for one in types)
        if isinstance(types, str):
            return self._bare_type(types, schema)
        if "properties" in schema or "items" in schema:
            return self._bare_type("object" if "properties" in schema else "array", schema)
        return self._anything()

    def _bare_type(self, name: str, schema: Mapping[str, Any]) -> str:
        match name:
            case "string":
                self._check_string(schema)
                quote = joined((BARE_QUOTE,), self._rules.specials)
                return f"{quote} {self._rules.until(BARE_QUOTE, _length(schema) or ANY)}"
            case "object":
                return self._bare_object(schema)
            case "array":
                return self._bare_array(schema)
        return self.json({**schema, "type": name})

    def _bare_array(self, schema: Mapping[str, Any]) -> str:
        item = self._bare_value(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _bare_constant(self, value: Any) -> str:
        if isinstance(value, str):
            return joined((BARE_QUOTE, value, BARE_QUOTE), self._rules.specials)
        return self.json({"const": value})

    def _anything(self) -> str:
        """Returns the rule of any value."""
        if "any" not in self._references:
            self._references["any"] = self._rules.name("value")
            types = ("string", "number", "boolean", "null", "array", "object")
            body = " | ".join(self._bare_type(one, {}) for one in types)
            self._rules.lines.append(f"{self._references['any']}: {body}")
        return self._references["any"]

    # for all forms

    def _members(self, schema: Mapping[str, Any], named: Callable[[str, Any], str]) -> list[_Member]:
        required = schema.get("required", ())
        properties = schema.get("properties") or {}
        return [_Member(self._rules.add("member", named(name, one)), name in required)
                for name, one in properties.items() if one is not False]  # fmt: skip

    def _listed(self, members: list[_Member], other: str | None, comma: str) -> str:
        """Returns the expression that matches a list of members with commas between them.

        other: the expression of a member that the schema does not name; any number of such members may follow
        """
        tail = self._rules.add("rest", f"({comma} {other})*") if other else '""'
        first = [f"{other} {tail}", '""'] if other else ['""']
        for one in reversed(members):
            own = f"{one.rule} {tail}"
            first = [own] if one.required else [own, *first]
            rest = f"{comma} {one.rule}" if one.required else f"({comma} {one.rule})?"
            tail = self._rules.add("rest", f"{rest} {tail}")
        return f"({' | '.join(first)})"

    def _open_ended(self, schema: Mapping[str, Any]) -> bool:
        """Whether an object may have members that the schema does not name."""
        return schema.get("additionalProperties", True) is not False

    def _other_names(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        return f" & ~/{either(properties)}/" if properties else ""

    def _check_top(self) -> None:
        self._cannot(self._root, [key for key in COMBINING if key in self._root], "at the top of parameters")

    def _check_string(self, schema: Mapping[str, Any]) -> None:
        if kind_of(schema, self._root) is not Kind.JSON:
            self._cannot(schema, sorted(set(schema) - KNOWN_OF_STRINGS), "of a string")

    def _cannot(self, schema: Mapping[str, Any], keywords: list[str], where: str) -> None:
        """Refuses keywords of a strict function, and reports those of another, which are left to the model."""
        for keyword in keywords:
            made = keyword == "allOf"  # the client may not have written it: it may have been made of other keywords
            what = "a combination of keywords" if made else keyword
            reason = f"{what} {where} is not supported in this model's format of calls"
            path = shown_path(self._function.param, (*self._paths.get(id(schema), ()), *([] if made else [keyword])))
            if self._function.strict:
                raise refused(path, reason)
            report_dropped({path: reason})


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists; None if it lists no values."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def _length(schema: Mapping[str, Any]) -> str:
    """Returns a regex of the lengths that a string may have; empty if every length is allowed."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return f"(?s:.{{{least},{'' if most is None else most}}})" if least or most is not None else ""


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

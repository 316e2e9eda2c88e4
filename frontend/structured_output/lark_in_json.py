"""Rewrites a Lark grammar so that it describes its texts as they stand between the quotes of a JSON string.

JSON writes each character on its own: most as they are, the quote, the backslash and control characters as escapes. So
a grammar is rewritten by rewriting its texts and the sets of characters in its regular expressions. Each character has
one spelling, which is that of `json.dumps`.

llguidance splits texts into terminals without looking back. After `a` and a backslash, it could not end the terminal
`/.+/` before the backslash, although `\\n` follows. Therefore each escape is a terminal of its own, and what held it, a
regular expression or a terminal of the client's, becomes an expression or a rule of terminals.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from frontend.structured_output.productive_rules import TOKENS

ESCAPED = frozenset([*range(32), ord('"'), ord("\\")])  # the characters that JSON writes as escapes
PLAIN = r'[^"\\\x00-\x1f]'  # the class of all others
ALL_ESCAPES = r'\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f]))'
SPACE = frozenset([9, 10, 11, 12, 13])
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "0": 0}
LETTERS_AND_DIGITS = re.compile(r"\{(?:L[ultmo]?|N[dlo]?|M[nce]?|Alphabetic|Lowercase|Uppercase|Letter|Number|Mark)\}")
# Lark's terminals that grammars import, as llguidance has them.
COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "FLOAT": r"[0-9]+e[+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]", "UCASE_LETTER": "[A-Z]", "LCASE_LETTER": "[a-z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "LF": r"\n", "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+", "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
}  # fmt: skip
IMPORT = re.compile(r"%import\s+common(?:\.(\w+)(?:\s*->\s*(\w+))?|\s*\(([\w\s,]+)\))\s*(?:(?://|#).*)?")
OPTIONS = re.compile(r"\[\s*(?:capture\s*(?:=\s*\"\w*\")?|max_tokens\s*=\s*\d+)?\s*\]")
CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\})")
GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z-]*)(?P<end>[:)])))?")
REPEATED = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
MAX_DEPTH = 64


class Unsupported(ValueError):
    """The grammar has no form within JSON; the message says why."""


@lru_cache(maxsize=32)
def in_json(grammar: str) -> str:
    """Returns the grammar of the same texts within a JSON string, without its quotes.

    grammar: a valid text in llguidance's Lark
    Raises Unsupported for special tokens, other grammars in it, `&`, `~`, and rare notation of regular expressions.
    """
    return _Grammar().rewritten(grammar)


class _Grammar:
    """Rewrites one grammar."""

    def __init__(self) -> None:
        self._terminals: dict[str, str] = {}  # the rules that stand for terminals, by their names
        self._ignored: list[str] = []  # the texts between terminals
        self._last: list[str] = []

    def rewritten(self, grammar: str) -> str:
        made = "".join(self._pieces(grammar))
        skipped = f"json_ignored: ({' | '.join(self._ignored)})*" if self._ignored else 'json_ignored: ""'
        return "\n".join([made, *self._last, skipped])

    def _pieces(self, grammar: str) -> Iterator[str]:
        at, in_rule = 0, True
        while at < len(grammar):
            token = TOKENS.match(grammar, at)
            if token is None:
                raise Unsupported("its notation is not known")
            at, text = token.end(), token.group()
            match token.lastgroup:
                case "defined" | "options":
                    name = token["defined"]
                    if not OPTIONS.fullmatch(token["options"] or "[]"):
                        raise Unsupported(f"the options {token['options']} have no form within JSON")
                    in_rule = not _is_terminal(name)
                    text = text if in_rule else f"{self._terminal(name)}:"
                case "directive":
                    text = self._directive(text)
                case "json":
                    raise Unsupported("JSON within it has no form within JSON")
                case "literal":
                    text = _atom(_literal(text), in_rule)
                case "name" if _is_terminal(text):
                    text = _atom(self._terminal(text), in_rule)
                case "sign" if text in "&~":
                    raise Unsupported(f"{text} has no form within JSON")
            yield text

    def _terminal(self, name: str) -> str:
        return self._terminals.setdefault(name, f"json_terminal_{len(self._terminals)}")

    def _directive(self, text: str) -> str:
        name, _, rest = text.strip().partition(" ")
        if name == "%ignore":
            made = "".join(self._pieces(f"IGNORED: {rest}"))
            self._ignored.append(f"({made.partition(':')[2].strip()})")
            return ""
        if name != "%import":
            return text
        found = IMPORT.fullmatch(text.strip())
        if found is None:
            raise Unsupported("only terminals of `common` can be imported")
        names = [(one.strip(), "") for one in found[3].split(",")] if found[3] else [(found[1], found[2])]
        for one, other in names:
            if one not in COMMON:
                raise Unsupported(f"`common.{one}` is not known")
            self._last.append(f"{self._terminal(other or one)}: {_Regex(COMMON[one]).rewritten()}")
        return ""


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _atom(expression: str, in_rule: bool) -> str:
    """Returns a terminal's expression, with what a grammar ignores before it."""
    return f"(json_ignored {expression})" if in_rule else f"({expression})"


def _literal(text: str) -> str:
    if text[0] in "<@":
        raise Unsupported("special tokens and other grammars have no form within JSON")
    if text[0] == "/":
        body, _, flags = text[1:].rpartition("/")
        if set(flags) - set("isu"):
            raise Unsupported(f"the flags {flags} of a regular expression have no form within JSON")
        return _Regex(body, dot_all="s" in flags, any_case="i" in flags).rewritten()
    if '".."' in text:
        low, high = (json.loads(one) for one in re.findall(r'"(?:[^"\\]|\\.)*"', text))
        return _Regex(f"[{_code(ord(low))}-{_code(ord(high))}]").rewritten()
    case = "i" * text.endswith("i")
    parts = re.findall(r'[^"\\\x00-\x1f]+|["\\\x00-\x1f]', json.loads(text.removesuffix("i")))
    quoted = [json.dumps(json.dumps(one, ensure_ascii=False)[1:-1], ensure_ascii=False) for one in parts]
    return " ".join(one if parts[i] in map(chr, ESCAPED) else one + case for i, one in enumerate(quoted)) or '""'


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a regular expression.

    text: an expression in Lark, or a regular expression without escapes if `plain`
    run: the expression to use in a repetition without a limit, which takes several characters at once
    """

    text: str
    plain: bool = False
    run: str = ""


@dataclass(slots=True)
class _Regex:
    """Rewrites one regular expression in Rust's syntax."""

    text: str
    dot_all: bool = False
    any_case: bool = False
    at: int = 0
    depth: int = 0

    def rewritten(self) -> str:
        """Returns the expression in Lark."""
        node = self._alternatives()
        if self.at < len(self.text):
            raise Unsupported("a regular expression has a bracket too many")
        return self._lark(node)

    def _lark(self, node: _Node) -> str:
        if not node.plain:
            return node.text
        return f"/{node.text}/{'i' * self.any_case}" if node.text else '""'

    def _alternatives(self) -> _Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsupported("a regular expression is nested too deeply")
        ways = [self._sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            ways.append(self._sequence())
        self.depth -= 1
        if len(ways) == 1:
            return ways[0]
        if all(one.plain for one in ways):
            return _Node(f"(?:{'|'.join(one.text for one in ways)})", plain=True)
        texts = [self._lark(one) for one in ways]
        runs = [one.run or texts[i] for i, one in enumerate(ways)]
        return _Node(f"({' | '.join(texts)})", run=f"({' | '.join(runs)})")

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            node = self._repeated(self._one())
            if parts and parts[-1].plain and node.plain:
                node = _Node(parts.pop().text + node.text, plain=True)
            parts.append(node)
        if len(parts) < 2:
            return parts[0] if parts else _Node("", plain=True)
        return _Node(f"({' '.join(map(self._lark, parts))})")

    def _repeated(self, node: _Node) -> _Node:
        while found := REPEATED.match(self.text, self.at):
            self.at = found.end()
            how = found[1]
            if node.plain:
                node = _Node(f"(?:{node.text}){how}", plain=True)
            else:
                node = _Node(f"({(node.run if how in '*+' else '') or node.text}){how}")
        return node

    def _one(self) -> _Node:
        one = self.text[self.at]
        if one == "(":
            return self._group()
        if one == "[":
            return self._class()
        if one == "\\":
            members, spelled = self._member()
            return self._character(members) if isinstance(members, int) else self._set(spelled, members)
        if one in "*+?{":
            raise Unsupported("a brace or a repetition of nothing has no form within JSON")
        self.at += 1
        if one == ".":
            return self._set(r"\s\S", ESCAPED) if self.dot_all else self._set(r"^\n", ESCAPED - {10})
        return _Node("", plain=True) if one in "^$" else self._character(ord(one))

    def _group(self) -> _Node:
        found = GROUP.match(self.text, self.at)
        flags = (found["flags"] or "") if found else "x"
        if found is None or set(flags) - set("su-"):
            raise Unsupported(f"the group {self.text[self.at : self.at + 4]} has no form within JSON")
        self.at = found.end()
        on, _, off = flags.partition("-")
        outer, self.dot_all = self.dot_all, ("s" in on or self.dot_all) and "s" not in off
        if found["end"] == ")":  # for the rest of the expression
            return _Node("", plain=True)
        node = self._alternatives()
        if not self.text.startswith(")", self.at):
            raise Unsupported("a group is not closed")
        self.at += 1
        self.dot_all = outer
        return node

    def _character(self, code: int) -> _Node:
        if code not in ESCAPED:
            return _Node(_code(code), plain=True)
        return _Node(json.dumps(json.dumps(chr(code))[1:-1]))

    def _class(self) -> _Node:
        begin = self.at
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        found: set[int] = set()
        first = True
        while first or not self.text.startswith("]", self.at):
            first = False
            low, _ = self._member()
            if not isinstance(low, int):
                found |= low
                continue
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                end, _ = self._member()
                if not isinstance(end, int):
                    raise Unsupported("a range up to a class has no form within JSON")
                high = end
            found |= {one for one in ESCAPED if low <= one <= high}
        self.at += 1
        return self._set(self.text[begin + 1 : self.at - 1], ESCAPED - found if negated else found)

    def _set(self, body: str, members: frozenset[int] | set[int]) -> _Node:
        """Returns a set of characters. body: between its brackets; members: those in it that JSON writes as escapes"""
        if not members:
            return _Node(f"[{body}]", plain=True)
        plain = f"[[{body}]&&{PLAIN}]"
        texts = [json.dumps(chr(one))[1:-1] for one in sorted(members)]
        escapes = f"/{ALL_ESCAPES}/" if members == ESCAPED else " | ".join(map(json.dumps, texts))
        case = "i" * self.any_case
        return _Node(f"(/{plain}/{case} | {escapes})", run=f"(/{plain}+/{case} | {escapes})")

    def _member(self) -> tuple[int | frozenset[int], str]:
        """Reads a character, or a class with a name. Returns its code, or which of ESCAPED it has; and its text."""
        begin = self.at
        one = self.text[begin : begin + 1]
        if one == "" or one == "[" or self.text[begin : begin + 2] in ("&&", "--", "~~"):
            raise Unsupported("this class of a regular expression has no form within JSON")
        self.at += 1
        if one != "\\":
            return ord(one), one
        name = self.text[self.at : self.at + 1]
        if found := CODE.match(self.text, begin):
            self.at = found.end()
            return int(next(filter(None, found.groups())), 16), found[0]
        self.at += 1
        text = self.text[begin : self.at]
        if name in "dws":
            return SPACE if name == "s" else frozenset(), text
        if name in "DWS":
            return ESCAPED - SPACE if name == "S" else ESCAPED, text
        if name in "pP" and (named := LETTERS_AND_DIGITS.match(self.text, self.at)):
            self.at = named.end()
            return frozenset() if name == "p" else ESCAPED, self.text[begin : self.at]
        if name in CONTROLS:
            return CONTROLS[name], text
        if not name or name.isalnum() or name in "<>":
            raise Unsupported(f"\\{name} in a regular expression has no form within JSON")
        return ord(name), text

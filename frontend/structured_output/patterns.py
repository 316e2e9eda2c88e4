"""Translates the regular expressions of JSON Schema (ECMA-262) into the syntax of llguidance (Rust's).

Where dialects differ (`.`, `\\s`, `\\D`, …), the translation matches what all of them match: a string that it allows is
valid for a validator in JavaScript, in Python and in Rust. Look-ahead is translated where it stands at the beginning of
an anchored expression, as in `^(?!\\.)…`: then it is a second expression that the same string matches.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

DIGITS, WORD = "0-9", "0-9A-Za-z_"
# White space in JavaScript and in Python and in Rust; and white space in any of them.
SPACE = r"\t-\r\x20\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
ANY_SPACE = SPACE + r"\x1c-\x1f\u{85}\u{feff}"
ANY_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u{200c}\u{200d}"
# The body of a class for each escape that stands for many characters: what it holds, or what it leaves out.
HOLDS = {"d": DIGITS, "w": WORD, "s": SPACE}
LEAVES_OUT = {"D": r"\p{Nd}", "W": ANY_WORD, "S": ANY_SPACE}
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
DOT = r"[^\n\r\u{85}\u{2028}\u{2029}]"
ANYTHING = "(?s:.)"
COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
GROUP = re.compile(r"\(\?(?::|P?<([A-Za-z_$][\w$]*)>)")
LOOK = re.compile(r"\(\?<?[=!]")
PROPERTY = re.compile(r"[pP]\{\^?[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
MAX_LENGTH, MAX_DEPTH = 16_384, 64
MAX_UNLIKE = 8  # how many characters an expression in a negative look-ahead may have


class Unsupported(ValueError):
    """The expression cannot be enforced; the message says why."""


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters. body: what stands between the brackets of a class"""

    body: str
    negated: bool = False

    @property
    def regex(self) -> str:
        return f"[{'^' if self.negated else ''}{self.body}]"

    @property
    def others(self) -> str:
        """The class of all other characters."""
        return f"[{'' if self.negated else '^'}{self.body}]"


@lru_cache(maxsize=256)
def translated(pattern: str) -> tuple[str, ...]:
    """Returns expressions in llguidance's syntax. A string matches `pattern` if it matches all of them.

    Raises Unsupported.
    """
    if len(pattern) > MAX_LENGTH:
        raise Unsupported(f"it is longer than {MAX_LENGTH} characters")
    parts, rest, anchored = [], pattern, pattern.startswith("^")
    while anchored and (rest[1:].startswith(("(?=", "(?!"))):
        inner, after = _group(rest[1:])
        if _alternatives(after)[1:]:
            raise Unsupported("look-ahead before alternatives is not supported")
        parts += [f"^(?:{_translated(inner[3:-1])})"] if inner[2] == "=" else _unlike(inner[3:-1])
        rest = "^" + after
    return (*parts, _translated(rest))


def words_unlike(words: list[str]) -> str:
    """Returns an expression (of ECMA-262) that every string matches except these words. Raises Unsupported."""
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for word in words:
        node = tree
        for one in word:
            node = node.setdefault(one, {})
        node[""] = {}
    return f"^{_unlike_tree(tree, 0)}$"


def _unlike_tree(tree: dict[str, dict], depth: int) -> str:  # type: ignore[type-arg]
    if depth > MAX_DEPTH // 2:
        raise Unsupported("a word is too long to be excluded")
    letters = {one: f"\\u{{{ord(one):x}}}" for one in tree if one}
    ways = [] if "" in tree else [""]
    ways.append(f"[^{''.join(letters.values())}][^]*")
    ways += [escaped + _unlike_tree(tree[one], depth + 1) for one, escaped in letters.items()]
    return f"(?:{'|'.join(ways)})"


def _unlike(inner: str) -> list[str]:
    """Returns expressions for `(?!inner)` at the beginning of a string."""
    return [_unlike_one(one) for one in _alternatives(inner)]


def _unlike_one(inner: str) -> str:
    anywhere = inner.startswith((".*", "[\\s\\S]*"))
    text = inner.removeprefix(".*").removeprefix("[\\s\\S]*") if anywhere else inner
    ends = text.endswith("$") and not text.endswith("\\$")
    text = (text.removesuffix("$") if ends else text.removesuffix(".*")).removeprefix("" if anywhere else "^")
    sets: list[_Set] = []
    at = 0
    while at < len(text):
        found, at = _one_set(text, at)
        sets.append(found)
        if ends and not anywhere and len(sets) == 1 and text[at:] in ("*", "+"):  # not only of such characters
            return found.others if text[at:] == "*" else f"^(?:|{ANYTHING}*{found.others}{ANYTHING}*)$"
        if at < len(text) and text[at] in "*+?{":
            raise Unsupported("this negative look-ahead is not supported")
    if not sets or len(sets) > MAX_UNLIKE or (anywhere and (ends or len(sets) > 2)):
        raise Unsupported("this negative look-ahead is not supported")
    if not anywhere:
        made = f"{ANYTHING}+" if ends else ""
        for one in reversed(sets):
            ways = ["", f"{one.others}{ANYTHING}*"] + ([f"{one.regex}{made}"] if made else [])
            made = f"(?:{'|'.join(ways)})"
        return f"^{made}$"
    first, last = sets[0], sets[-1]
    if len(sets) == 1:
        return f"^{first.others}*$"
    if first == last:
        return f"^(?:{first.others}|{first.regex}{first.others})*{first.regex}?$"
    if first.negated or last.negated:
        raise Unsupported("this negative look-ahead is not supported")
    return f"^(?:{first.others}|{first.regex}+[^{first.body}{last.body}])*{first.regex}*$"


def _structure(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Yields each character outside of escapes and classes, with its index and how many groups are open after it."""
    depth = at = 0
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[":
                at = _class_end(pattern, at)
            case character:
                depth += (character == "(") - (character == ")")
                yield at, character, depth
        at += 1


def _alternatives(pattern: str) -> list[str]:
    """Splits an expression at its outermost `|`."""
    ends = [at for at, character, depth in _structure(pattern) if character == "|" and not depth]
    return [pattern[begin + 1 : end] for begin, end in pairwise([-1, *ends, len(pattern)])]


def _group(pattern: str) -> tuple[str, str]:
    """Splits the group at the beginning off an expression."""
    for at, character, depth in _structure(pattern):
        if character == ")" and not depth:
            return pattern[: at + 1], pattern[at + 1 :]
    raise Unsupported("a group is not closed")


def _class_end(pattern: str, at: int) -> int:
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 1 + (pattern[at] == "\\")
    return at


def _translated(pattern: str) -> str:
    made: list[str] = ["(?i)"] if pattern.startswith("(?i)") else []
    at, depth, repeatable = 4 * len(made), 0, False
    while at < len(pattern):
        match one := pattern[at]:
            case "*" | "+" | "?" | "{":
                piece, at = _repeat(pattern, at, repeatable)
            case "(":
                depth += 1
                piece, at = _opening(pattern, at)
            case ")":
                depth -= 1
                piece, at = ")", at + 1
            case "|" | "^" | "$":
                piece, at = one, at + 1
            case ".":
                piece, at = DOT, at + 1
            case _:
                found, at = _one_set(pattern, at)
                piece = found.regex if len(found.body) > 2 or found.negated else found.body
        if not 0 <= depth <= MAX_DEPTH:
            raise Unsupported("its groups are nested too deeply or not balanced")
        repeatable = one not in "^|(*+?{" or piece == r"\{"
        made.append(piece)
    if depth:
        raise Unsupported("a group is not closed")
    return "".join(made)


def _repeat(pattern: str, at: int, repeatable: bool) -> tuple[str, int]:
    one, found = pattern[at], COUNT.match(pattern, at)
    if one == "{" and found is None:
        if pattern.startswith("{,", at):
            raise Unsupported("{,N} means different things to different libraries")
        return r"\{", at + 1
    if not repeatable:
        raise Unsupported(f"there is nothing that {one} could repeat")
    piece, at = (one, at + 1) if found is None else (found[0], found.end())
    if at < len(pattern) and pattern[at] == "?":  # laziness changes no match of a whole string
        at += 1
    return piece, at


def _opening(pattern: str, at: int) -> tuple[str, int]:
    if LOOK.match(pattern, at):
        raise Unsupported("look-around is not supported")
    if not pattern.startswith("(?", at):
        return "(?:", at + 1
    if found := GROUP.match(pattern, at):
        return "(?:", found.end()
    raise Unsupported(f"the group {pattern[at : at + 4]} is not supported")


def _one_set(pattern: str, at: int) -> tuple[_Set, int]:
    """Reads a character, an escape or a class. Returns it, and where it ends."""
    one = pattern[at]
    if one == "[":
        return _class(pattern, at)
    if one == "\\":
        return _escape(pattern, at)
    if one == ".":
        return _Set(DOT[2:-1], negated=True), at + 1
    if one in "()|^$*+?":
        raise Unsupported(f"{one} is not supported there")
    return _Set(_literal(one)), at + 1


def _class(pattern: str, at: int) -> tuple[_Set, int]:
    negated = pattern.startswith("[^", at)
    at += 1 + negated
    if pattern.startswith("]", at):
        if negated:
            return _Set(r"\x{0}-\x{10ffff}"), at + 1
        raise Unsupported("the class [] means different things to different libraries")
    body: list[str] = []
    while not pattern.startswith("]", at):
        low, at = _member(pattern, at)
        if pattern.startswith("-", at) and not pattern.startswith("-]", at):
            high, end = _member(pattern, at + 1)
            if len(low) == 1 and len(high) == 1:
                if low > high:
                    raise Unsupported(f"the range {low}-{high} is empty")
                body.append(f"{_literal(low)}-{_literal(high)}")
            else:  # next to an escape for many characters, the hyphen stands for itself
                body += [_body(low), r"\-", _body(high)]
            at = end
        else:
            body.append(_body(low))
    return _Set("".join(body), negated), at + 1


def _body(member: str) -> str:
    return _literal(member) if len(member) == 1 else member


def _member(pattern: str, at: int) -> tuple[str, int]:
    """Reads a member of a class: one character, or the body of a class of many."""
    if at >= len(pattern):
        raise Unsupported("a class is not closed")
    if pattern[at] != "\\":
        return pattern[at], at + 1
    if pattern.startswith("\\b", at):
        return "\b", at + 2
    name = pattern[at + 1 : at + 2]
    if name in LEAVES_OUT:
        return f"[^{LEAVES_OUT[name]}]", at + 2
    if name in HOLDS:
        return HOLDS[name], at + 2
    if found := PROPERTY.match(pattern, at + 1):
        return "\\" + found[0], found.end()
    return _character(pattern, at)


def _escape(pattern: str, at: int) -> tuple[_Set, int]:
    name = pattern[at + 1 : at + 2]
    if name in HOLDS:
        return _Set(HOLDS[name]), at + 2
    if name in LEAVES_OUT:
        return _Set(LEAVES_OUT[name], negated=True), at + 2
    if name in ("b", "B"):
        raise Unsupported(f"\\{name} (a word's edge) is not supported")
    if name == "k" or (name.isdigit() and name != "0"):
        raise Unsupported("back-references are not supported")
    if found := PROPERTY.match(pattern, at + 1):
        return _Set("\\" + found[0]), found.end()
    one, at = _character(pattern, at)
    return _Set(_literal(one)), at


def _character(pattern: str, at: int) -> tuple[str, int]:
    """Reads an escape for one character."""
    name = pattern[at + 1 : at + 2]
    if name in CONTROLS:
        return CONTROLS[name], at + 2
    if name == "c" and re.match(r"[A-Za-z]", pattern[at + 2 : at + 3]):
        return chr(ord(pattern[at + 2]) % 32), at + 3
    for form in (r"\\x([0-9A-Fa-f]{2})", r"\\u([0-9A-Fa-f]{4})", r"\\u\{([0-9A-Fa-f]{1,6})\}"):
        if found := re.compile(form).match(pattern, at):
            return _code_point(pattern, int(found[1], 16), found.end())
    if not name or name.isalnum():
        raise Unsupported(f"the escape \\{name} is not supported")
    return name, at + 2


def _code_point(pattern: str, code: int, end: int) -> tuple[str, int]:
    if 0xD800 <= code < 0xDC00 and (low := re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(pattern, end)):
        code, end = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00, low.end()
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise Unsupported("half of a surrogate pair is no character")
    return chr(code), end


def _literal(character: str) -> str:
    """Returns a character as it is written in and outside classes."""
    if character.isprintable() and (character.isalnum() or character == "_" or not character.isascii()):
        return character
    if character.isprintable() and character not in " <>":  # \\< and \\> mean the edges of words
        return f"\\{character}"
    return f"\\x{{{ord(character):x}}}"

"""Writes parts of a grammar in llguidance's Lark, where a special token is written as its id."""

import re
from collections.abc import Iterable, Mapping

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

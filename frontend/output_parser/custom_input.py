"""The input of a custom tool, decoded from the arguments of the function that stands for it, as they arrive."""

import re

import msgspec

_BEGIN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^u])")


class CustomInput:
    """Turns the fragments of a JSON object with one text (`{"input": "…"}`) into the text.

    A text that is cut off ends where it is cut. Arguments of another form, which no grammar allows, have no input.
    """

    def __init__(self) -> None:
        self._left = ""  # what has arrived and is not decoded
        self._inside = self._ended = False

    def feed(self, fragment: str) -> str:
        """Returns the text that a fragment adds; "" while an escape is incomplete."""
        if self._ended:
            return ""
        self._left += fragment
        if not self._inside:
            if (begin := _BEGIN.match(self._left)) is None:
                return ""
            self._inside, self._left = True, self._left[begin.end() :]
        return self._text()

    def _text(self) -> str:
        left, at, texts = self._left, 0, list[str]()
        while at < len(left):
            if left[at] == '"':
                self._ended = True
                break
            found = (_ESCAPE if left[at] == "\\" else _PLAIN).match(left, at)
            if found is None or self._may_go_on(found[0], len(left) - at):
                break
            texts.append(_decoded(found[0]) if left[at] == "\\" else found[0])
            at = found.end()
        self._left = left[at:]
        return "".join(texts)

    def _may_go_on(self, escape: str, left: int) -> bool:
        """Whether the escape is the first half of a surrogate pair, and the second half may still arrive."""
        return len(escape) == 6 and escape[:2] == "\\u" and escape[2:4].lower() in HIGH and left < 12


HIGH = ("d8", "d9", "da", "db")


def _decoded(escape: str) -> str:
    try:
        text: str = msgspec.json.decode(f'"{escape}"')
    except msgspec.DecodeError:  # half of a pair, which is no character
        return "\ufffd"
    return text


def input_of(arguments: str) -> str:
    """Returns the input in the whole arguments of a call."""
    return CustomInput().feed(arguments)

"""Marks: short texts that stand for pictures in a message's text until the chat template renders the message.

A mark begins and ends with half of a surrogate pair. A client cannot send these characters, because JSON in UTF-8
cannot hold them, so a mark cannot be forged. Code that joins, trims or moves texts needs no special case for marks.

PARTED stands between two texts of a message. A template that gets parts gets both texts as parts; for any other
template, PARTED becomes a line break.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE, PARTED = "\udcf0", "\udcf1", "\udcf2"
MARK = re.compile(f"{OPEN}([0-9a-f]{{64}}){CLOSE}")
PICTURES = "pictures"  # the key of a message's pictures: its sources by their marks


class Source(NamedTuple):
    """Where a picture comes from.

    url: a data:, http(s): or file: URL
    detail: the field of OpenAI's formats
    path: where the request has the picture, for error messages: "messages[0].content[1]"
    """

    url: str
    detail: str = "auto"
    path: str = ""

    @property
    def mark(self) -> str:
        """The text that stands for the picture in a message. Equal sources have equal marks."""
        digest = hashlib.sha256(self.url.encode(errors="surrogatepass") + b"\0" + self.detail.encode()).hexdigest()
        return OPEN + digest + CLOSE


def base64_source(data: str, kind: str = "image/*") -> Source:
    """Returns the source of a picture that a request has in base64. kind: its media type"""
    return Source(f"data:{kind};base64,{data}")


def found_in(parts: Iterable[Any], name: str, first: int = 0) -> dict[str, Any]:
    """Returns `{"pictures": {mark: source, ...}}`, to add to a message; {} if the message's parts have no picture.

    name: the field with the parts, which becomes the path of the sources; first: the number of the first part
    """
    found: dict[str, Source] = {}
    for number, part in enumerate(parts, first):
        if (source := getattr(part, "source", None)) is not None:
            found.setdefault(source.mark, source._replace(path=f"{name}[{number}]"))
    return {PICTURES: found} if found else {}


def within(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the message with `place` before the paths of its pictures: "messages[0]"."""
    if (found := message.get(PICTURES)) is None:
        return message
    return message | {PICTURES: {mark: one._replace(path=f"{place}.{one.path}") for mark, one in found.items()}}


def has_marks(text: object) -> bool:
    return isinstance(text, str) and OPEN in text


def parts_of(content: object) -> object:
    """Returns a message's text as the list of parts that a template for pictures expects; other content unchanged."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for place, piece in enumerate(MARK.split(content)):  # texts at even places, digests of marks at odd places
        if place % 2:
            parts.append({"type": "image"})
        else:
            parts += [{"type": "text", "text": text} for text in piece.split(PARTED) if text]
    return parts


def joined(texts: Iterable[str]) -> str:
    """Returns the text of a message with these parts, of which pictures are marks. An empty part says nothing."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1].endswith(CLOSE) or text.startswith(OPEN)):
            pieces.append(PARTED)
        pieces.append(text)
    return "".join(pieces)


def whole(text: str) -> str:
    """Returns a message's text with line breaks between its parts."""
    return text.replace(PARTED, "\n")


def without_sources(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Source]]:
    """Returns the messages without their `pictures`, and the sources of all pictures by their marks."""
    sources: dict[str, Source] = {}
    for one in messages:
        sources = one.get(PICTURES, {}) | sources  # of equal pictures, the first one is named
    return [{key: value for key, value in one.items() if key != PICTURES} for one in messages], sources


def in_order(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the marks of all messages, in the order of the text."""
    contents = [one["content"] for one in messages if isinstance(one.get("content"), str)]
    return [match.group() for content in contents for match in MARK.finditer(content)]

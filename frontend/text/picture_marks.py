"""What stands for a picture in a message's text, until the chat template shows the message.

A mark begins and ends with half of a surrogate pair. No text of a request has one, because JSON in UTF-8 cannot. So
everything that joins, trims and moves texts treats marked ones alike, and no text can be taken for a mark.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "\udcf0", "\udcf1"
MARK = re.compile(f"{OPEN}([0-9a-f]{{64}}){CLOSE}")
PICTURES = "pictures"  # the key of a message's pictures: its sources by their marks


class Source(NamedTuple):
    """Where a picture comes from. url: data:, http(s): or file:; detail: of OpenAI's formats"""

    url: str
    detail: str = "auto"

    @property
    def mark(self) -> str:
        """What stands for the picture in a text. Equal pictures have equal marks."""
        digest = hashlib.sha256(self.url.encode(errors="surrogatepass") + b"\0" + self.detail.encode()).hexdigest()
        return OPEN + digest + CLOSE


def base64_source(data: str, kind: str = "image/*") -> Source:
    """Returns the source of a picture that a request has in base64, of this media type."""
    return Source(f"data:{kind};base64,{data}")


def found_in(parts: Iterable[Any]) -> dict[str, Any]:
    """Returns the field of a message that holds the sources of its pictures by their marks; {} if it has no picture."""
    sources = [source for part in parts if (source := getattr(part, "source", None)) is not None]
    return {PICTURES: {source.mark: source for source in sources}} if sources else {}


def has_marks(text: object) -> bool:
    return isinstance(text, str) and OPEN in text


def parts_of(content: object) -> object:
    """Returns a message's text as the list of parts that a template for pictures expects; other content unchanged."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for place, piece in enumerate(MARK.split(content)):  # texts, and between them the digests of marks
        if place % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def without_sources(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Source]]:
    """Returns the messages without their sources, and all sources by their marks."""
    sources = {mark: source for one in messages for mark, source in one.get(PICTURES, {}).items()}
    return [{key: value for key, value in one.items() if key != PICTURES} for one in messages], sources


def in_order(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the marks in the order in which a template meets them."""
    contents = [one["content"] for one in messages if isinstance(one.get("content"), str)]
    return [match.group() for content in contents for match in MARK.finditer(content)]

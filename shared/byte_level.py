"""The alphabet of byte-level vocabularies, which GPT-2 introduced: a printable character stands for each byte."""

from collections.abc import Mapping


def _alphabet() -> dict[str, int]:
    """Visible Latin-1 characters stand for themselves; the characters from U+0100 on stand for the other bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTES: Mapping[str, int] = _alphabet()  # character → the byte that it stands for
_CHARS = {byte: char for char, byte in BYTES.items()}


def spelled(text: str) -> str:
    """Returns how a byte-level vocabulary spells a text."""
    return "".join([_CHARS[byte] for byte in text.encode()])

"""Bounds how many characters of a text one token can stand for, if tokenizer.json shows a sure bound.

With this bound, a text that is too long for the context can be refused before it is tokenized.
"""

import math
from collections.abc import Collection
from typing import Any

import msgspec
from tokenizers import Tokenizer as Engine

from shared.byte_level import spelled

Part = dict[str, Any]  # a normalizer or a pre-tokenizer of tokenizer.json

# Normalizer -> how many characters it may combine into one. NFC: up to 4, the longest canonical decomposition.
CHARS_TO_ONE = {"NFC": 4, "Prepend": 1}
SLICE = 1 << 16  # characters that are counted at a time
KEEPS_ALL_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers that drop no text


class _Model(msgspec.Struct):
    type: str = ""
    byte_fallback: bool = False


class _Added(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _File(msgspec.Struct):
    model: _Model
    normalizer: Part | None = None
    pre_tokenizer: Part | None = None
    added_tokens: list[_Added] = []


class TokenLength(msgspec.Struct, frozen=True):
    """The most characters that one token stands for; 0 if no bound is known.

    ascii: the bound for a text of ASCII characters only
    any: the bound for any text
    reach: for each ASCII character, the length of the longest token that contains it; empty if not known
    """

    ascii: int = 0
    any: int = 0
    reach: tuple[int, ...] = ()

    @classmethod
    def of(cls, file: bytes, engine: Engine, alphabet: frozenset[str]) -> "TokenLength":
        """Returns the bounds for a tokenizer.

        file: the content of tokenizer.json
        alphabet: the 256 characters that stand for bytes in the vocabulary of a byte-level tokenizer
        """
        parts = msgspec.json.decode(file, type=_File)
        normalizing = [_chars_to_one(part) for part in _flat(parts.normalizer, "normalizers")]
        splitting = _flat(parts.pre_tokenizer, "pretokenizers")
        vocabulary = engine.get_vocab(with_added_tokens=True)
        swallows = any(added.lstrip or added.rstrip for added in parts.added_tokens)  # such a token takes in all blanks
        byte_level = any(part["type"] == "ByteLevel" for part in splitting)
        letters = alphabet if byte_level else {f"<0x{byte:02X}>" for byte in range(256)}
        drops_nothing = parts.model.type == "BPE" and (byte_level or parts.model.byte_fallback)
        if swallows or not (drops_nothing and all(normalizing) and all(map(_keeps_all, splitting))):
            return cls()
        if not letters <= vocabulary.keys():  # a letter that the vocabulary lacks may vanish
            return cls()
        longest = max(map(len, vocabulary))
        is_spelled_out = byte_level and all(part["type"] == "NFC" for part in _flat(parts.normalizer, "normalizers"))
        return cls(longest, longest * max(normalizing, default=1), _reach(vocabulary) if is_spelled_out else ())

    def fewest_tokens(self, text: str, enough: float = math.inf) -> int:
        """Returns a lower bound of the number of tokens of a text; 0 if no bound is known.

        enough: counting may stop as soon as the bound is above this number, to save time
        """
        if self.reach and text.isascii():
            return self._fewest_by_character(text, enough)
        longest = self.ascii if text.isascii() else self.any
        return -(-len(text) // longest) if longest else 0

    def _fewest_by_character(self, text: str, enough: float) -> int:
        """Sums 1 / reach over all characters. The characters of one token add at most 1, so the sum is a lower bound.

        The bound is close for text and code, because only runs of blanks or of one punctuation mark are long tokens.
        """
        lengths = sorted(set(self.reach))
        kind_of = bytes(lengths.index(length) for length in self.reach) + bytes(128)
        least = 0.0
        for at in range(0, len(text), SLICE):
            kinds = text[at : at + SLICE].encode().translate(kind_of)
            least += sum(kinds.count(kind) / length for kind, length in enumerate(lengths))
            if least > enough + 1:
                break
        return math.ceil(least * (1 - 1e-9))  # slightly less, because a sum of floats is not exact


def _reach(vocabulary: Collection[str]) -> tuple[int, ...]:
    """Returns for each ASCII character the length of the longest token that contains it, as itself or as a byte."""
    found = {spelling: 1 for byte in range(128) for spelling in _spellings(byte)}
    pending = set(found)
    for token in sorted(vocabulary, key=len, reverse=True):
        for letter in pending.intersection(token):
            found[letter] = len(token)
            pending.remove(letter)
    return tuple(max(found[spelling] for spelling in _spellings(byte)) for byte in range(128))


def _spellings(byte: int) -> set[str]:
    return {chr(byte), spelled(chr(byte))}


def _flat(part: Part | None, name: str) -> list[Part]:
    if part is None:
        return []
    return [part] if part["type"] != "Sequence" else [inner for one in part[name] for inner in _flat(one, name)]


def _chars_to_one(normalizer: Part) -> int:
    """Returns how many characters a normalizer may combine into one; 0 if this is not known."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == len(new):
            return 1
    return CHARS_TO_ONE.get(normalizer["type"], 0)


def _keeps_all(pre_tokenizer: Part) -> bool:
    match pre_tokenizer:
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return pre_tokenizer["type"] in KEEPS_ALL_TEXT

"""How many characters of a text one token can stand for, where the tokenizer's file allows to say that for certain.

With such a bound, a text that cannot fit a context is known before it is tokenized.
"""

import math
from collections.abc import Collection
from typing import Any

import msgspec
from tokenizers import Tokenizer as Engine

from shared.byte_level import spelled

Part = dict[str, Any]  # a normalizer or a pre-tokenizer of tokenizer.json

# NFC makes one character of up to four: no canonical decomposition is longer.
CHARS_TO_ONE = {"NFC": 4, "Prepend": 1}
SLICE = 1 << 16  # characters
KEEPS_ALL_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace"})  # pre-tokenizers


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

    ascii: in a text of ASCII characters
    any: in any text
    reach: for each ASCII character, the most characters that a token with it stands for; empty if that is not known
    """

    ascii: int = 0
    any: int = 0
    reach: tuple[int, ...] = ()

    @classmethod
    def of(cls, file: bytes, engine: Engine, alphabet: frozenset[str]) -> "TokenLength":
        """Returns the bound for a tokenizer.

        file: its tokenizer.json
        alphabet: the stand-ins of all bytes in the vocabulary of a byte-level tokenizer
        """
        parts = msgspec.json.decode(file, type=_File)
        normalizing = [_chars_to_one(part) for part in _flat(parts.normalizer, "normalizers")]
        splitting = _flat(parts.pre_tokenizer, "pretokenizers")
        vocabulary = engine.get_vocab(with_added_tokens=True)
        swallows = any(added.lstrip or added.rstrip for added in parts.added_tokens)  # any amount of white space
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
        """Returns a number of tokens that no tokenization of the text is below; 0 if no bound is known.

        enough: a number above this one is as good as the largest, so the rest of the text need not be read
        """
        if self.reach and text.isascii():
            return self._fewest_by_character(text, enough)
        longest = self.ascii if text.isascii() else self.any
        return -(-len(text) // longest) if longest else 0

    def _fewest_by_character(self, text: str, enough: float) -> int:
        """Adds 1 / reach for every character. The characters of one token together add at most 1.

        Only runs of blanks or of one punctuation mark are very long tokens, so the bound is close for text and code.
        """
        lengths = sorted(set(self.reach))
        kind_of = bytes(lengths.index(length) for length in self.reach) + bytes(128)
        least = 0.0
        for at in range(0, len(text), SLICE):
            kinds = text[at : at + SLICE].encode().translate(kind_of)
            least += sum(kinds.count(kind) / length for kind, length in enumerate(lengths))
            if least > enough + 1:
                break
        return math.ceil(least * (1 - 1e-9))  # a sum of floats is not exact


def _reach(vocabulary: Collection[str]) -> tuple[int, ...]:
    """Returns for each ASCII character the length of the longest token with it, spelled as bytes or as text."""
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
    """Returns how many characters a normalizer may make one of; 0 if that is not known."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == len(new):
            return 1
    return CHARS_TO_ONE.get(normalizer["type"], 0)


def _keeps_all(pre_tokenizer: Part) -> bool:
    match pre_tokenizer:
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return pre_tokenizer["type"] in KEEPS_ALL_TEXT

"""A checkpoint's tokenizer: encodes text, off the event loop if it is long, decodes ids, and knows special tokens.

Uses only the `tokenizers` library, because importing transformers would load torch. This module has the text of each
single id; `detokenizer` turns a stream of ids into text.
"""

import hashlib
import math
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from tokenizers import Tokenizer as Engine

from frontend.errors import BadRequest
from frontend.text.detokenizer import PARTIAL, ByteFallbackText, ByteLevelText, Detokenizer, MarkedText, WindowText
from frontend.text.special_tokens import AliasedEngine, beginnings_of, encodings_of, pairs_of
from frontend.text.tokenizer_files import TokenizerError, TokenizerFiles
from frontend.turns import FairThreads
from shared.checkpoint import BYTES, spelled
from shared.machine import return_memory

__all__ = ["AddedTokens", "Tokenizer", "TokenizerError"]
T = TypeVar("T")
# Encoding takes 0.25 µs a character (bench/micro/text.py). Another thread adds 0.04 ms if the event loop is idle, but 2
# to 15 ms if it is busy, because of the GIL. So text that takes up to a millisecond is encoded on the event loop.
INLINE_CHARS = 4096
THREADS = 3  # a tenant uses all but one of them
# Longer texts are encoded one at a time in a thread of their own, because encoding takes 0.2 KB of memory a character.
HUGE_CHARS = 1 << 18
MAX_IDS = 2**32  # all ids are below this
END = "\udfff"  # follows each token's text in `vocabulary_texts`: half of a surrogate pair, which no text has
# The texts of all ids, each followed by END, one after another; and for each id, where it ends.
VocabularyTexts = tuple[str, "array[int]"]
BRACKETS = re.compile(r"<\S+>|\[\S+\]|◁\S+▷")


class Lazy(dict[int, T]):
    """Maps an id to `make(id)`, computed at the first access. Empty values (of unknown ids) are not kept."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> T:
        value = self._make(token)
        if value:
            self[token] = value
        return value


BYTE_TOKENS = {f"<0x{byte:{case}}>": byte for byte in range(256) for case in ("02X", "02x")}


def byte_level(token: str) -> bytes:
    """Returns the bytes of a byte-level token. An added token with other characters is returned in UTF-8."""
    try:
        return bytes([BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """Returns the bytes of a byte-fallback token: one byte for "<0xE2>", else its text with "▁" replaced by a space."""
    byte = BYTE_TOKENS.get(token)
    return bytes([byte]) if byte is not None else token.replace("▁", " ").encode()


@dataclass(frozen=True, slots=True, eq=False)
class AddedTokens:
    """The spellings of added tokens that control a model and that untrusted text must not produce.

    special: spellings of special tokens, except single characters and blanks
    tags: spellings of other added tokens in brackets, such as <think>, that the tokenizer does not normalize
    """

    special: frozenset[str]
    tags: frozenset[str]

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Returns the spellings of a tokenizer."""
        entries = engine.get_added_tokens_decoder().values()
        special = {one.content for one in entries if one.special and len(one.content.strip()) > 1}
        normalizes = engine.normalizer is not None
        others = {one.content for one in entries if not (one.special or (one.normalized and normalizes))}
        return cls(frozenset(special), frozenset(filter(BRACKETS.fullmatch, others)))


class Tokenizer:
    """One model's tokenizer, shared by all streams of a process.

    folder: the checkpoint's folder, or at least that of its tokenizer
    hash: the hex SHA-256 of tokenizer.json
    eos_ids: the ids that end an output
    templates: sources of chat templates by name
    named_tokens: special tokens by name ("bos_token", ...), for the templates
    generation: the content of generation_config.json
    task: what the checkpoint is served for
    image_format: how the model sees images; None if it takes no images
    added: the added tokens that control the model
    """

    def __init__(self, source: TokenizerFiles) -> None:
        self._engine: Engine = source.engine
        self._decoding = source.decoding
        self.folder = source.folder
        self.hash = hashlib.sha256(source.data).hexdigest()
        self.templates = source.templates
        self.named_tokens = source.named_tokens
        self.eos_ids = source.eos_ids
        self.generation = source.generation
        self.task = source.task
        self.image_format = source.image_format
        self.added = AddedTokens.of(self._engine)
        added = self._engine.get_added_tokens_decoder()
        self._specials = {entry.content: token for token, entry in added.items() if entry.special}
        self.special_ids = frozenset(self._specials.values())
        self.vocab_size = max(self._engine.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._token_length = TokenLength.of(source.data, self._engine, frozenset(BYTES))
        self._raw = Lazy(self._make_bytes)
        self._texts = Lazy(self._make_text)

    @classmethod
    def load(cls, folder: Path, template: str = "", task: str = "auto") -> Self:
        """Reads the checkpoint in `folder`; raises TokenizerError saying what is missing or broken.

        template: a file that replaces the checkpoint's chat templates
        task: --task
        """
        tokenizer = cls(TokenizerFiles.read(folder, template, task))
        if tokenizer.task.name == "score" and not tokenizer.task.labels and None in tokenizer._yes_no:
            raise TokenizerError(f"--task score: {folder} has no tokens `yes` and `no` to score with")
        return tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. With `add_special_tokens` the tokenizer adds BOS and the like, for completions.

        Pass False for a chat prompt, which has these tokens already. Raises BadRequest for text that is not Unicode.
        """
        return (await self.encode_batch([text], add_special_tokens))[0]

    async def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode`, for several texts. If they have more than `INLINE_CHARS` together, a thread encodes them."""
        size = sum(map(len, texts))
        if size <= INLINE_CHARS:
            return self.encode_now(texts, add_special_tokens)
        if size <= HUGE_CHARS:
            return await self._pool.run(self.encode_now, texts, add_special_tokens)
        return await self._huge_pool.run(self._encode_huge, texts, add_special_tokens)

    async def encode_following(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts that continue another text, without the space that some tokenizers put first.

        For such a tokenizer, a line break is put before each text, and its ids are removed from the result.

        Raises BadRequest if a text cannot be separated from the line break.
        """
        if not self._puts_space_before:
            return await self.encode_batch(texts, False)
        (lead,) = self.encode_now(["\n"], False)
        encoded = await self.encode_batch(["\n" + text for text in texts], False)
        if any(ids[: len(lead)] != lead for ids in encoded):
            raise BadRequest("the tokenizer cannot encode the text apart from the one before it; send token ids")
        return [ids[len(lead) :] for ids in encoded]

    @cached_property
    def _puts_space_before(self) -> bool:
        first, second, both = self.encode_now(["\n", "x", "\nx"], False)
        return first + second != both

    def fewest_tokens(self, text: str, enough: float = math.inf) -> int:
        """Returns a lower bound of the number of tokens of a text, without tokenizing it; 0 if no bound is known.

        enough: see TokenLength.fewest_tokens
        """
        return self._token_length.fewest_tokens(text, enough)

    def encode_now(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encodes in this thread. Calls the library's function for batches, because only this one releases the GIL."""
        return [encoding.ids for encoding in encodings_of(self._engine, texts, add_special_tokens)]

    async def encode_many(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Returns the ids of each text, or of each pair of texts, joined by the tokenizer's own rule for pairs."""
        return await self._in_thread(self.encode_now, texts, add_special_tokens)

    async def encode_plain(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Like `encode_many`, but no added token is recognized in the texts: its spelling is encoded as text."""
        return await self._in_thread(lambda: self._aliased.encode_plain(texts, add_special_tokens))

    async def encode_pairs(self, texts: Sequence[tuple[str, str]], *, plain: bool) -> list[tuple[list[int], int]]:
        """Returns the ids of each pair of texts, and where its second text begins; see `pairs_of`.

        plain: as in `encode_plain`
        """
        if plain:
            return await self._in_thread(lambda: self._aliased.pairs(texts))
        return await self._in_thread(pairs_of, self._engine, texts)

    async def beginnings(self, texts: Sequence[str], most: int) -> list[str]:
        """Returns the beginning of each text that has at most `most` tokens, without the tokenizer's own.

        A text is cut before a token, and before the whole character if a token begins inside of one.
        """
        return await self._in_thread(beginnings_of, self._engine, texts, most)

    @cached_property
    def around(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts before and after a text."""
        (bare,), (whole,) = self.encode_now(["a"], False), self.encode_now(["a"], True)
        places = range(len(whole) - len(bare) + 1)
        before = next((at for at in places if whole[at : at + len(bare)] == bare), 0)
        return before, len(whole) - len(bare) - before

    async def encode_marked(self, texts: Sequence[str], mark: str) -> list[list[int]]:
        """Returns the ids of texts with marks (see TokenTexts): a spelling after a mark is encoded as plain text."""
        return await self._in_thread(lambda: [self._aliased.encode_marked(text, mark) for text in texts])

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await self._pool.run(function, *arguments)

    @cached_property
    def _aliased(self) -> AliasedEngine:
        """The copy for untrusted text, made at first use because it takes as much memory as the tokenizer itself."""
        return AliasedEngine(self._engine, self.added.special | self.added.tags)

    @property
    def yes_no(self) -> tuple[int, int]:
        """The ids of the tokens `yes` and `no`; only for a task that scores with them, as `load` checked."""
        yes, no = self._yes_no
        assert yes is not None and no is not None
        return yes, no

    @property
    def _yes_no(self) -> tuple[int | None, int | None]:
        return self._engine.token_to_id("yes"), self._engine.token_to_id("no")

    def _encode_huge(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            return self.encode_now(texts, add_special_tokens)
        finally:
            return_memory()

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decodes all `ids` together; unknown ids have no text."""
        known = [token for token in ids if 0 <= token < MAX_IDS]
        text: str = self._engine.decode(known, skip_special_tokens=skip_special)
        return text

    def detokenizer(self, marks: Mapping[str, str] | None = None) -> Detokenizer:
        """Creates a detokenizer for a new stream. Its texts joined equal `decode` of all ids.

        marks: spellings of special tokens to show, and the text to show for each; other special tokens are hidden
        """
        if marks:
            return MarkedText(self._plain_detokenizer(), self.ids_of(marks))
        return self._plain_detokenizer()

    def ids_of(self, marks: Mapping[str, str]) -> dict[int, str]:
        """Returns `marks` with token ids instead of spellings; spellings that are no token are left out."""
        find = self._engine.token_to_id
        return {id: text for spelling, text in marks.items() if (id := find(spelling)) is not None}

    @cached_property
    def _known_marks(self) -> dict[str, int | None]:
        return {}

    def id_of_mark(self, spelling: str) -> int | None:
        """Returns the id of a token by its spelling, or None. Remembers it, so only for spellings that are fixed."""
        marks = self._known_marks
        if spelling not in marks:
            marks[spelling] = self._engine.token_to_id(spelling)
        return marks[spelling]

    @cached_property
    def _derived(self) -> dict[Callable[["Tokenizer"], Any], Any]:
        return {}

    def once(self, make: Callable[["Tokenizer"], T]) -> T:
        """Returns `make(self)`, which is computed at the first call. make: a function of a module, not a closure"""
        if make not in self._derived:
            self._derived[make] = make(self)
        value: T = self._derived[make]
        return value

    def _plain_detokenizer(self) -> Detokenizer:
        match self._decoding.kind:
            case "bytes":
                return ByteLevelText(self._texts, self._raw)
            case "fallback":
                return ByteFallbackText(self._texts, self._raw, self._decoding.strip)
            case _:
                return WindowText(self.decode, lambda token: self._token_text(token) is None)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that the id adds to a text; empty for special and unknown ids."""
        return self._raw[token]

    def token_text(self, token: int) -> str:
        """Returns an id's text for display: special tokens are spelled out, an incomplete character becomes U+FFFD."""
        if token in self.special_ids:
            return self.decode([token], skip_special=False)
        return self._raw[token].decode(errors="replace")

    @cached_property
    def vocabulary_texts(self) -> VocabularyTexts:
        """The texts of all ids, as `token_text` returns them. Computing this takes a second for a large vocabulary."""
        texts = [self.token_text(id) + END for id in range(self.vocab_size)]
        return "".join(texts), array("l", accumulate(map(len, texts)))

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the id of each text that is a special token; other texts are left out."""
        return {text: self._specials[text] for text in texts if text in self._specials}

    def specials_except(self, ids: Collection[int]) -> dict[str, str]:
        """Returns `marks` for `detokenizer` that show all special tokens, except those with these ids, as they are."""
        return {text: text for text, id in self._specials.items() if id not in ids}

    def close(self) -> None:
        """Stops the encoding threads when they have encoded their texts."""
        self._pool.close()
        self._huge_pool.close()

    @cached_property
    def _huge_pool(self) -> FairThreads:
        return FairThreads("tokenize-huge", 1)

    @cached_property
    def _pool(self) -> FairThreads:
        return FairThreads("tokenize", THREADS, each=THREADS - 1)

    def _token_text(self, token: int) -> str | None:
        """Returns the vocabulary's spelling of an id; None for ids that have no text."""
        spelling: str | None = self._engine.id_to_token(token) if 0 <= token < MAX_IDS else None
        return None if spelling in self._specials else spelling

    def _make_bytes(self, token: int) -> bytes:
        spelling = self._token_text(token)
        if spelling is None:
            return b""
        match self._decoding.kind:
            case "bytes":
                return byte_level(spelling)
            case "fallback":
                return byte_fallback(spelling)
            case _:
                return self.decode([token]).encode()

    def _make_text(self, token: int) -> str:
        if self._decoding.kind == "fallback" and self._token_text(token) in BYTE_TOKENS:
            return PARTIAL
        try:
            return self._raw[token].decode()
        except UnicodeDecodeError:
            return PARTIAL


# Bounds how many characters of a text one token can stand for, if tokenizer.json shows a sure bound.
#
# With this bound, a text that is too long for the context can be refused before it is tokenized.

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
    found = {spelling: 1 for byte in range(128) for spelling in _token_texts(byte)}
    pending = set(found)
    for token in sorted(vocabulary, key=len, reverse=True):
        for letter in pending.intersection(token):
            found[letter] = len(token)
            pending.remove(letter)
    return tuple(max(found[spelling] for spelling in _token_texts(byte)) for byte in range(128))


def _token_texts(byte: int) -> set[str]:
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

"""Makes tokenizer.json from the vocabulary in the metadata of a GGUF file.

Two kinds of tokenizers are served: byte-level BPE (tokenizer.ggml.model `gpt2`), and SentencePiece's BPE with tokens
for single bytes (`llama`; with merges, `gemma4`). The result gives the ids of the original tokenizer. Patterns and
normalization, which the file does not store, are in pre_tokenizers.py; a tokenizer without an entry there is refused.
"""

import json
import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import Tokenizer

from shared.gguf.container import Container
from shared.gguf.errors import GgufError
from shared.gguf.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

log = logging.getLogger("sluice.gguf")

NONE = (-1, (1 << 32) - 1)  # ids that mean "there is no such token"
SPACE = "▁"  # how SentencePiece spells a space
# Phi-3's original tokenizer drops white space after its special tokens, but not after these.
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")

Json = dict[str, Any]


class TokenType(IntEnum):
    """The numbers in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL)
ADDED = (*SPECIAL, TokenType.USER_DEFINED)  # tokens of these types are found in a text before any other token
MERGED = (TokenType.NORMAL, TokenType.USER_DEFINED)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file by id. Unused ids have no token in the original tokenizer."""

    container: Container
    texts: list[str]
    types: list[int]

    @classmethod
    def read(cls, container: Container) -> "Vocabulary":
        texts: list[str] = container.entries("tokenizer.ggml.tokens", str)
        types: list[int] = container.entries("tokenizer.ggml.token_type", int, [TokenType.NORMAL] * len(texts))
        if len(types) != len(texts):
            raise GgufError(f"{container.name}: {len(types)} token types for {len(texts)} tokens")
        sentencepiece = container.metadata.get("tokenizer.ggml.model") == "llama"
        for i, text in enumerate(texts):
            if text == f"[PAD{i}]":  # a filler for an unused id; old converters give it the type user-defined
                types[i] = TokenType.UNUSED
            if sentencepiece and types[i] == TokenType.USER_DEFINED and set(text) == {" "}:
                texts[i] = SPACE * len(text)  # the converter has replaced every SPACE by a space
        vocabulary = cls(container, texts, types)
        if len(vocabulary.ids()) != len(texts) - types.count(TokenType.UNUSED):
            raise GgufError(f"{container.name}: tokenizer.ggml.tokens holds a token twice")
        return vocabulary

    def ids(self) -> dict[str, int]:
        pairs = enumerate(zip(self.texts, self.types, strict=True))
        return {text: i for i, (text, type) in pairs if type != TokenType.UNUSED}

    def named(self, name: str) -> int | None:
        """Returns the id of tokenizer.ggml.`name`_token_id, if the file names one.

        Converters of 2023 wrote -1 as an unsigned number for "none".
        """
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.container.metadata:
            return None
        token = self.container.integer(key)
        if token in NONE:
            log.warning("%s: %s is %d, which is read as none", self.container.name, key, token)
            return None
        if not 0 <= token < len(self.texts):
            raise GgufError(f"{self.container.name}: {key} is {token}, but there are {len(self.texts)} tokens")
        return token

    def added(self) -> list[int]:
        return [i for i, type in enumerate(self.types) if type in ADDED]


def tokenizer_of(vocabulary: Vocabulary) -> str:
    """Returns tokenizer.json. Raises GgufError when the tokenizer is not supported, or contradicts itself."""
    container = vocabulary.container
    kind = container.text("tokenizer.ggml.model")
    make = MODELS.get(kind)
    if make is None:
        supported = ", ".join(MODELS)
        raise GgufError(f"{container.name}: tokenizer {kind!r} is not supported; supported are {supported}")
    parts = {"version": "1.0", "truncation": None, "padding": None, **make(vocabulary)}
    text = json.dumps(parts, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself, no subclass
        raise GgufError(f"{container.name}: its tokenizer does not fit together: {error}") from error
    return text


def _byte_level(vocabulary: Vocabulary) -> Json:
    container = vocabulary.container
    rules = _pre_tokenizer(container)
    return {
        "added_tokens": [_added_token(vocabulary, i) for i in vocabulary.added()],
        "normalizer": {"type": "NFC"} if rules.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rules.parts)},
        "post_processor": _post_processor(vocabulary, rules.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": _bpe(vocabulary, _stored_merges(container)) | {"ignore_merges": rules.ignore_merges},
    }


def _pre_tokenizer(container: Container) -> PreTokenizer:
    name = container.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise GgufError(f"{container.name}: tokenizer.ggml.pre {name!r} is not known; known are {supported}")
    return PRE_TOKENIZERS[name]


def _stored_merges(container: Container) -> list[tuple[str, str]]:
    merges = []
    for merge in container.entries("tokenizer.ggml.merges", str):
        at = merge.find(" ", 1)
        if at < 0:
            raise GgufError(f"{container.name}: tokenizer.ggml.merges holds {merge!r}, which is no pair")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _sentencepiece(vocabulary: Vocabulary) -> Json:
    return _pieces(vocabulary, _merges_by_score(vocabulary))


def _gemma4(vocabulary: Vocabulary) -> Json:
    """Gemma 4's tokenizer: pieces like SentencePiece's, but with a list of merges."""
    return _pieces(vocabulary, _stored_merges(vocabulary.container))


def _pieces(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Json:
    container = vocabulary.container
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if container.metadata.get(key):
            raise GgufError(f"{container.name}: {key} is not supported")
    unknown = vocabulary.named("unknown")
    if unknown is None:
        unknown = next((i for i, type in enumerate(vocabulary.types) if type == TokenType.UNKNOWN), None)
    prefix = container.flag("tokenizer.ggml.add_space_prefix", True)
    to_symbol = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    start = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {
        "added_tokens": [_added_token(vocabulary, i) for i in vocabulary.added()],
        "normalizer": {"type": "Sequence", "normalizers": [*start, to_symbol]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(vocabulary, merges)
        | {
            "unk_token": None if unknown is None else vocabulary.texts[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns every pair of tokens that together form a token, ordered by the score of the formed token.

    SentencePiece merges the pair with the best score first. User-defined tokens, which the converter gives no score of
    their own, come before all others.
    """
    container, types = vocabulary.container, vocabulary.types
    scores: list[float] = container.entries("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise GgufError(f"{container.name}: {len(scores)} scores for {len(types)} tokens")
    pieces = {text: i for text, i in vocabulary.ids().items() if types[i] in MERGED}
    if len({scores[i] for i, type in enumerate(types) if type == TokenType.NORMAL}) == 1:
        raise GgufError(f"{container.name}: all tokens have the same score, so the order of merges is not known")
    found = []
    for text, i in pieces.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in pieces and right in pieces:
                rank = float("-inf") if types[i] == TokenType.USER_DEFINED else -scores[i]
                found.append((rank, -len(left), -len(right), pieces[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Json:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary.ids(), "merges": merges,
    }  # fmt: skip


def _added_token(vocabulary: Vocabulary, token: int) -> Json:
    container, text = vocabulary.container, vocabulary.texts[token]
    phi3 = container.metadata.get("general.architecture") == "phi3"
    strips = phi3 and container.metadata["tokenizer.ggml.model"] == "llama" and text not in PHI3_KEEPS_SPACES
    return {
        "id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": strips, "normalized": False,
        "special": vocabulary.types[token] in SPECIAL,
    }  # fmt: skip


def _post_processor(vocabulary: Vocabulary, add_bos: bool) -> Json | None:
    """Returns the post-processor, which adds tokens around a text; None if no tokens are added."""
    container = vocabulary.container
    adds = {
        "bos": container.flag("tokenizer.ggml.add_bos_token", add_bos),
        "eos": container.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: vocabulary.named(name) for name, added in adds.items() if added}
    for name, token in ids.items():
        if token is None:
            raise GgufError(f"{container.name} adds a {name.upper()} token to texts, but names none")
    if not ids:
        return None
    texts = {name: vocabulary.texts[token] for name, token in ids.items() if token is not None}

    def around(sequence: str, number: int) -> list[Json]:
        parts = {name: [{"SpecialToken": {"id": text, "type_id": number}}] for name, text in texts.items()}
        middle = [{"Sequence": {"id": sequence, "type_id": number}}]
        return [*parts.get("bos", []), *middle, *parts.get("eos", [])]

    tokens = {texts[name]: {"id": texts[name], "ids": [token], "tokens": [texts[name]]} for name, token in ids.items()}
    single = around("A", 0)
    return {
        "type": "TemplateProcessing", "single": single, "pair": single + around("B", 1), "special_tokens": tokens
    }  # fmt: skip


MODELS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}

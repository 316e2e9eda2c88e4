"""Makes tokenizer.json from the vocabulary in the metadata of a GGUF file.

Two kinds of tokenizers are served: byte-level BPE (tokenizer.ggml.model `gpt2`), and SentencePiece's BPE with tokens
for single bytes (`llama`; with merges, `gemma4`). The result gives the ids of the original tokenizer. Patterns and
normalization, which the file does not store, are in tables below; a tokenizer without an entry is refused.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import Tokenizer

from shared.gguf.config_encoder import unigram, word_piece
from shared.gguf.container import Container
from shared.gguf.naming import GgufError

# How tokenizers with byte-level BPE split text before merging, by the name in tokenizer.ggml.pre.
#
# GGUF files store only this name. Each row states, in the format of tokenizer.json, how the original tokenizer of
# this name splits; llama.cpp's own patterns are sometimes only close to the original. Other names are refused,
# because a wrong split gives wrong tokens.

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """nfc: whether text is first normalized to NFC. ignore_merges: whether a word that is a token is taken whole.
    add_bos: whether a beginning-of-text token is added unless the file states otherwise.
    """

    parts: tuple[Part, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _byte_level(use_regex: bool) -> Part:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> tuple[Part, ...]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return (part, _byte_level(use_regex=False))


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_BY_CASE = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = "|".join((*_WORD_BY_CASE, r"\p{N}", _SIGNS, _SPACES))
_O200K = "|".join((*(rf"{word}{_CONTRACTIONS}?" for word in _WORD_BY_CASE), r"\p{N}{1,3}", _SIGNS, _SPACES))
_NUMBERS, _CHINESE_AND_KANA = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HUNYUAN = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = PreTokenizer(_split(_CL100K), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer(_split(_QWEN2), nfc=True)
_GPT2 = PreTokenizer((_byte_level(use_regex=True),))
_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_GLM = PreTokenizer(_split(_CL100K), ignore_merges=True)
_HUNYUAN_PARTS = PreTokenizer((_split(_NUMBERS)[0], _split(_CHINESE_AND_KANA)[0], *_split(_HUNYUAN)))
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": PreTokenizer(_split(_QWEN35), nfc=True),
    "gpt-2": _GPT2,
    "roberta-bpe": _GPT2,
    "exaone4": _GPT2,
    "olmo": PreTokenizer(_GPT2.parts, nfc=True),  # used by OLMoE
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,  # used by Granite 3
    "glm4": _GLM,
    "chatglm-bpe": _GLM,
    "seed-coder": PreTokenizer(_split(_SEED)),
    "tekken": PreTokenizer(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(_split(_O200K), ignore_merges=True),  # used by gpt-oss
    "command-r": PreTokenizer(_DIGITS.parts, nfc=True, add_bos=True),
    "hunyuan-dense": _HUNYUAN_PARTS,
    "deepseek-v3": _HUNYUAN_PARTS,  # also used by DeepSeek-R1
    "lfm2": _LLAMA3,
    "dbrx": PreTokenizer(_split(_CL100K)),  # used by Phi-4, OLMo 2 and Granite 4
}


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
        raise GgufError(f"{container.name}: tokenizer {kind!r:.80} is not supported; supported are {supported}")
    parts = {"version": "1.0", "truncation": None, "padding": None, **make(vocabulary)}
    text = json.dumps(parts, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself, no subclass
        raise GgufError(f"{container.name}: its tokenizer does not fit together: {error}") from error
    return text


def _byte_level_tokenizer(vocabulary: Vocabulary) -> Json:
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
        raise GgufError(f"{container.name}: tokenizer.ggml.pre {name!r:.80} is not known; known are {supported}")
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


MODELS = {
    "gpt2": _byte_level_tokenizer, "llama": _sentencepiece, "gemma4": _gemma4, "bert": word_piece, "t5": unigram,
}  # fmt: skip


# Makes tokenizer_config.json and generation_config.json from the metadata of a GGUF file.

TEMPLATE = "tokenizer.chat_template"
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos", "eot", "eom")  # the tokens that a file names as ends: of a text, a turn, a message
# Added tokens with these names end a text even if the file does not say so, as in llama.cpp: files of Phi-3 and older
# files of Gemma do not name the end of a turn.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
    "<turn|>", "<|tool_response>",  # Gemma 4
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
# gpt-oss ends a turn with a token of TURN_ENDS, and each message of a turn with MESSAGE_END, whatever the file names.
TURN_ENDS, MESSAGE_END = ("<|return|>", "<|call|>"), "<|end|>"
SAMPLING = {  # name in GGUF → name in generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
# general.basename → sampling parameters that the authors recommend on the model's page, but not in the files.
RECOMMENDED: dict[str, dict[str, float]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


def tokenizer_config_of(vocabulary: Vocabulary) -> Json:
    """Returns tokenizer_config.json: named tokens and chat templates."""
    tokens = {name: vocabulary.named(stored) for stored, name in NAMES.items()}
    named: Json = {name: vocabulary.texts[token] for name, token in tokens.items() if token is not None}
    if templates := _templates(vocabulary.container):
        only_default = templates.keys() == {"default"}
        listed = [{"name": name, "template": source} for name, source in templates.items()]
        named["chat_template"] = templates["default"] if only_default else listed
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named


def _templates(container: Container) -> dict[str, str]:
    found = {}
    for key in container.metadata:
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}."):
            found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = container.text(key)
    return found


def generation_config_of(vocabulary: Vocabulary) -> Json:
    """Returns generation_config.json: the ids that end a text, and recommended sampling parameters.

    Raises GgufError when the file names no end.
    """
    container = vocabulary.container
    ends = [token for name in ENDS if (token := vocabulary.named(name)) is not None]
    added = {vocabulary.texts[i]: i for i in vocabulary.added()}
    ends += [i for text, i in added.items() if text in END_TEXTS]
    if all(text in added for text in TURN_ENDS):
        ends = [i for i in ends if i != added.get(MESSAGE_END)] + [added[text] for text in TURN_ENDS]
    if not ends:
        raise GgufError(f"{container.name} has no tokenizer.ggml.eos_token_id")
    settings: Json = {"eos_token_id": list(dict.fromkeys(ends))}
    if (bos := vocabulary.named("bos")) is not None:
        settings["bos_token_id"] = bos
    sampling = RECOMMENDED.get(container.text("general.basename", "").lower(), {}) | {
        name: container.number(f"general.sampling.{stored}")
        for stored, name in SAMPLING.items()
        if f"general.sampling.{stored}" in container.metadata
    }
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    return settings | ({"do_sample": True, **sampling} if sampling else {})

"""How tokenizers with byte-level BPE split text before merging, by the name in tokenizer.ggml.pre.

GGUF files store only this name. Each row states, in the format of tokenizer.json, how the original tokenizer of this
name splits; llama.cpp's own patterns are sometimes only close to the original. Other names are refused, because a
wrong split gives wrong tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": PreTokenizer(_split(_QWEN35), nfc=True),
    "gpt-2": _GPT2,
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
    "hunyuan-dense": PreTokenizer((_split(_NUMBERS)[0], _split(_CHINESE_AND_KANA)[0], *_split(_HUNYUAN))),
    "lfm2": _LLAMA3,
    "dbrx": PreTokenizer(_split(_CL100K)),  # used by Phi-4, OLMo 2 and Granite 4
}

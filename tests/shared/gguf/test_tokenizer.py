"""A tokenizer that was converted to GGUF and back gives the ids of the original tokenizer."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from shared.gguf.container import Container
from shared.gguf.naming import GgufError
from shared.gguf.tokenizer import Vocabulary, tokenizer_of
from tests.checkpoints import SPECIAL, TEXT
from tests.gguf_files import vocabulary

CL100K = TikTokenConverter("").pattern
# Mistral's pattern, from the tokenizer.json of Mistral-Nemo
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# pattern in the tokenizer.json of Seed-OSS
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# pattern in the tokenizer.json of gpt-oss
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]
PIECES = [
    *TEXT, *SPECIAL, *USER_DEFINED, " ", "  ", "   ", "       ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000",
    "\u200b", "'s", "'S", "'ll", "'RE", "\u2019s", "1", "12", "123", "1234567", "٣٤", "½", "e\u0301",
    "\u00e9", "A\u030a", "\u212b", "n\u0303o", "\u1100\u1161", "\uac00", "\u0958", "ﬁ", "क्षि",
    "ไทย", "العربية", "🙂", "👩‍👩‍👧", "🇩🇪", "\ufe0f", "HelloWorld",
    "camelCase", "UPPER", "snake_case", "don't", "$5.00", "a/b//c", "...", "<|im", "_end|>", "<0x0A>", "\x00",
    "\x7f", "\U00010348", "\U0002f800", "[INST]", "</s>", "<s>", "def f(x):\n    return x\n",
]  # fmt: skip
WORDS = " ".join(TEXT).split()


def hostile(count: int, *, without: str = "") -> list[str]:
    draw = random.Random(5)

    def piece() -> str:
        kind = draw.random()
        if kind < 0.6:
            return draw.choice(PIECES)
        if kind < 0.8:
            return draw.choice(WORDS) + draw.choice(["", " ", ",", "\n"])
        return "".join(chr(draw.choice([draw.randrange(0x20, 0x250), draw.randrange(0xE000, 0x20000)])) for _ in "ab")

    texts = ["".join(piece() for _ in range(draw.randrange(1, 9))) for _ in range(count)]
    return [text.translate(dict.fromkeys(map(ord, without))) for text in texts]


def byte_level(parts: list[Any], *, nfc: bool = False, ignore_merges: bool = False, bos: bool = False) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on TEXT. parts: its pre-tokenizers."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    if bos:
        template = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def split(pattern: str) -> list[Any]:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False), by_bytes]


DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINALS: dict[str, Callable[[], Tokenizer]] = {
    "llama-bpe": lambda: byte_level(split(CL100K), ignore_merges=True, bos=True),
    "dbrx": lambda: byte_level(split(CL100K)),
    "qwen2": lambda: byte_level(split(QWEN2), nfc=True),
    "qwen35": lambda: byte_level(split(QWEN35), nfc=True),
    "tekken": lambda: byte_level(split(TEKKEN), ignore_merges=True, bos=True),
    "gpt-4o": lambda: byte_level(split(O200K), ignore_merges=True),
    "gpt-2": lambda: byte_level([GPT2]),
    "smollm": lambda: byte_level([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "olmo": lambda: byte_level([GPT2], nfc=True),
    "glm4": lambda: byte_level(split(CL100K), ignore_merges=True),
    "seed-coder": lambda: byte_level(split(SEED)),
    "deepseek-v3": lambda: byte_level([*(split(one)[0] for one in DEEPSEEK_V3), split("")[1]]),
}
ALIASES = {"exaone4": "gpt-2", "starcoder": "smollm", "refact": "smollm", "chatglm-bpe": "glm4"}


def sentencepiece(*, prefix: bool) -> tuple[Tokenizer, dict[str, float]]:
    """Llama 2's kind of tokenizer; without `prefix` Gemma's kind, in which runs of spaces are user-defined tokens.

    Returns the tokenizer with the scores of its pieces, from which transformers derives the merges.
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    runs = ["▁" * n for n in range(2, 6)] + ["\n\n"]
    pieces = [text for text in sorted(learned["vocab"], key=learned["vocab"].__getitem__) if text not in runs]
    ranks = {"".join(pair): -float(rank + 1) for rank, pair in enumerate(learned["merges"])}
    scores = {text: ranks.get(text, -5000.0 - i) for i, text in enumerate(pieces)} | dict.fromkeys(runs, 0.0)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {text: i for i, text in enumerate([*SPECIAL, "<unk>", *fallback, *pieces, *runs])}
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    start, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    if not prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens([*SPECIAL, "<unk>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*runs, *USER_DEFINED]])
    return tokenizer, scores


def translated(original: Tokenizer, **options: Any) -> Tokenizer:
    """Returns the tokenizer after a conversion to GGUF, as by llama.cpp's converter, and back."""
    size = original.get_vocab_size() + 9  # a model may have more rows than tokens
    metadata = vocabulary(json.loads(original.to_str()), size, **options)
    container = Container("model.gguf", metadata, {})
    return Tokenizer.from_str(tokenizer_of(Vocabulary.read(container)))


def assert_equal(original: Tokenizer, other: Tokenizer, texts: list[str]) -> None:
    for add_special_tokens in (True, False):
        expected = [one.ids for one in original.encode_batch(texts, add_special_tokens=add_special_tokens)]
        found = [one.ids for one in other.encode_batch(texts, add_special_tokens=add_special_tokens)]
        assert found == expected
    for ids in expected[:500]:
        assert other.decode(ids) == original.decode(ids)
    assert len({token for ids in expected for token in ids}) > 300


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_tokenizer_equals_the_original(pre: str) -> None:
    original = ORIGINALS[pre]()
    assert_equal(original, translated(original, pre=pre), hostile(3000))


@pytest.mark.parametrize(("alias", "pre"), ALIASES.items())
def test_names_of_the_same_split_give_the_same_tokenizer(alias: str, pre: str) -> None:
    original = ORIGINALS[pre]()
    assert translated(original, pre=alias).to_str() == translated(original, pre=pre).to_str()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_equals_the_original(prefix: bool) -> None:
    original, scores = sentencepiece(prefix=prefix)
    assert_equal(original, translated(original, scores=scores), hostile(3000))


def test_tokenizer_of_gemma4_equals_the_original() -> None:
    """The file of Gemma 4 has merges instead of scores."""
    original, _ = sentencepiece(prefix=False)
    state = json.loads(original.to_str())
    metadata = vocabulary(state, original.get_vocab_size() + 9) | {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.unknown_token_id": state["model"]["vocab"]["<unk>"],
    }  # fmt: skip
    found = Tokenizer.from_str(tokenizer_of(Vocabulary.read(Container("model.gguf", metadata, {}))))
    assert_equal(original, found, hostile(3000))


def test_hostile_texts_tell_the_patterns_apart() -> None:
    """Any two patterns split some text differently, so the tests above cannot pass with a wrong pattern."""
    texts, vocabularies = hostile(3000), {}
    for pre, original in ORIGINALS.items():
        parts = original()
        vocabularies[pre] = [
            [piece for piece, _ in parts.pre_tokenizer.pre_tokenize_str(parts.normalizer.normalize_str(text))]
            if parts.normalizer else [piece for piece, _ in parts.pre_tokenizer.pre_tokenize_str(text)]
            for text in texts
        ]  # fmt: skip
    different = [pre for pre in ORIGINALS if pre not in ("dbrx", "glm4")]
    assert all(vocabularies[a] != vocabularies[b] for a in different for b in different if a != b)


def test_phi3_strips_spaces_after_its_special_tokens() -> None:
    original, scores = sentencepiece(prefix=True)
    metadata = vocabulary(json.loads(original.to_str()), original.get_vocab_size(), scores=scores)
    container = Container("phi.gguf", metadata | {"general.architecture": "phi3"}, {})
    tokenizer = Tokenizer.from_str(tokenizer_of(Vocabulary.read(container)))
    assert tokenizer.encode("<|im_end|>\n The").ids == tokenizer.encode("<|im_end|>The").ids
    assert tokenizer.encode("<|endoftext|> The").ids != tokenizer.encode("<|endoftext|>The").ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, r"tokenizer.ggml.pre 'mystery' is not known; known are llama-bpe, "),
        ({"tokenizer.ggml.pre": "default"}, r"tokenizer.ggml.pre 'default' is not known"),
        ({"tokenizer.ggml.pre": None}, r"has no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer 'rwkv' is not supported; supported are gpt2, llama, gemma4"),
        ({"tokenizer.ggml.model": "llama"}, r"has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges holds 'ab', which is no pair"),
        ({"tokenizer.ggml.merges": ["qq zz"]}, r"its tokenizer does not fit together: .*qq"),
        ({"tokenizer.ggml.token_type": [1, 2]}, r"2 token types for \d+ tokens"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, r"bos_token_id is 1000000, but there are \d+ tokens"),
        ({"tokenizer.ggml.bos_token_id": None}, r"adds a BOS token to texts, but names none"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, r"holds a token twice"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer.ggml.tokens holds values of a wrong type"),
    ],
)  # fmt: skip
def test_lying_vocabulary_is_refused(change: dict[str, Any], words: str) -> None:
    original = ORIGINALS["llama-bpe"]()
    metadata = vocabulary(json.loads(original.to_str()), 800, pre="llama-bpe") | change
    container = Container("bad.gguf", {key: value for key, value in metadata.items() if value is not None}, {})
    with pytest.raises(GgufError, match=f"^bad.gguf.*{words}"):
        tokenizer_of(Vocabulary.read(container))


def test_equal_scores_are_refused() -> None:
    original, scores = sentencepiece(prefix=True)
    with pytest.raises(GgufError, match="all tokens have the same score"):
        translated(original, scores=dict.fromkeys(scores, -1000.0))

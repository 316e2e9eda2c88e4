"""Tokenizers of every kind that models have, by name."""

from collections.abc import Callable

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from tests.frontend.text.tokenizers import SPECIALS, byte_fallback, byte_level, metaspace
from tests.shared.gguf import test_tokenizer as gguf


def unigram() -> Engine:
    """SentencePiece's unigram model, whose special tokens are pieces of the vocabulary, too."""
    pieces = [*SPECIALS, *map(chr, range(33, 127)), "▁", "▁the", "the", "ow", "\n", "é"]
    engine = Engine(models.Unigram([("<unk>", 0.0), *((one, -1.0 - len(one) / 9) for one in pieces)], 0))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Replace("▁", " ")
    engine.add_special_tokens(SPECIALS)
    return engine


def prepending() -> Engine:
    """Llama 2's kind, which puts a space before the text and after every special token."""
    engine = byte_fallback()
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return engine


def first_space() -> Engine:
    """Llama 2's newer form, which puts a space only before the text."""
    engine = metaspace()
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return engine


def stripping() -> Engine:
    """Phi-3's kind, whose special tokens absorb the spaces beside them."""
    engine = byte_level()
    engine.add_special_tokens([AddedToken("<|im_start|>", special=True, rstrip=True, lstrip=True)])
    return engine


ENGINES: dict[str, Callable[[], Engine]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "prepending": prepending,
    "first space": first_space,
    "stripping": stripping,
    "unigram": unigram,
    "gguf spm": lambda: gguf.translated(gguf.sentencepiece(prefix=True)[0]),
    "gguf gemma": lambda: gguf.translated(gguf.sentencepiece(prefix=False)[0]),
}

"""Small tokenizers of every kind that the frontend distinguishes, written as checkpoint folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from shared.checkpoint import BYTES

SPECIALS = ["<s>", "</s>", "<|im_end|>"]
WORDS = ["th", "the", "he", "an", "in", "lo", "wo", "or", "ld"]


def byte_level() -> Engine:
    """GPT-2's kind of tokenizer: every byte is a token, and so are some merges ("Ġâ": a space and a third of "€")."""
    alphabet = sorted(BYTES)
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "o"), ("Ġ", "â"), ("Ã", "©"), ("ð", "Ł"), ("ĺ", "Ģ")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    engine = Engine(models.BPE(vocab=vocab, merges=pairs))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return _finished(engine)


def byte_fallback(strip: bool = False) -> Engine:
    """Gemma's kind, or with `strip` Llama 2's: a character without a token is spelled in bytes, "<0x..>"."""
    singles = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,é\n", "\ufffd", "▁▁"]
    pairs = [(word[:1], word[1:]) for word in WORDS if len(word) == 2] + [("th", "e"), ("▁", "the")]
    vocab = {token: index for index, token in enumerate([*singles, *("".join(pair) for pair in pairs)])}
    engine = Engine(models.BPE(vocab=vocab, merges=pairs, byte_fallback=True))
    engine.normalizer = normalizers.Replace(" ", "▁")
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    return _finished(engine)


def metaspace() -> Engine:
    """A tokenizer that is decoded in a window of tokens, because decoding removes the space of the first token."""
    vocab = {token: index for index, token in enumerate(["▁", *"abcdehlotw", "▁a", "▁the", "lo", "é", "👍"])}
    engine = Engine(models.BPE(vocab=vocab, merges=[("▁", "a"), ("l", "o")]))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    return _finished(engine)


def wordpiece() -> Engine:
    """Another tokenizer that is decoded in a window: a space comes before each token that does not begin with "##"."""
    vocab = {token: index for index, token in enumerate(["[UNK]", "the", "a", "##lo", "##w", "wor", "##ld", ",", "é"])}
    engine = Engine(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    engine.decoder = decoders.WordPiece(cleanup=False)
    return _finished(engine)


def _finished(engine: Engine) -> Engine:
    engine.add_special_tokens(SPECIALS)
    engine.add_tokens([AddedToken("<think>", normalized=False), AddedToken("tool call", normalized=False)])
    bos = engine.token_to_id("<s>")
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return engine


def save(engine: Engine, folder: Path, **files: object) -> Path:
    """Writes tokenizer.json and `files` into `folder`. files: name of a file without ".json" → its content"""
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder

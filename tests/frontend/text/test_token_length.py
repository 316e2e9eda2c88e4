"""The bound on the characters of one token holds for real tokenizers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from frontend.text.tokenizer import TokenLength
from shared.checkpoint import BYTES
from tests.frontend.text.tokenizers import byte_fallback, byte_level, metaspace

ALPHABET = frozenset(BYTES)
FILE: dict[str, Any] = json.loads(byte_level().to_str())


def loaded(**changed: Any) -> tuple[TokenLength, Engine]:
    file = json.dumps(FILE | changed)
    engine = Engine.from_str(file)
    return TokenLength.of(file.encode(), engine, ALPHABET), engine


def of(engine: Engine) -> TokenLength:
    return TokenLength.of(engine.to_str().encode(), engine, ALPHABET)


BOUNDED = [loaded(), loaded(normalizer={"type": "NFC"}), (of(byte_fallback()), byte_fallback())]
ADDED = {
    "id": 900, "content": " " * 12, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    "special": False,
}  # fmt: skip
WITH_ADDED = loaded(added_tokens=[ADDED])
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("the é€👍e\u0301\u0308ᾂ"), max_size=60)


@given(TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(text: str) -> None:
    for length, engine in BOUNDED:
        assert length.any and len(engine.encode(text, add_special_tokens=False).ids) >= length.fewest_tokens(text)


@given(st.text("eE <|a>\n\t-=", max_size=80))
def test_no_ascii_text_has_fewer_tokens_than_the_bound(text: str) -> None:
    for length, engine in [*BOUNDED, WITH_ADDED]:
        assert len(engine.encode(text, add_special_tokens=False).ids) >= length.fewest_tokens(text)


def test_long_token_of_spaces_does_not_loosen_the_bound_of_words() -> None:
    length, engine = WITH_ADDED
    assert length.ascii == 12 and length.reach[ord(" ")] == 12 and length.reach[ord("q")] < 4
    assert length.fewest_tokens(" " * 1200) == 100
    assert len(engine.encode(" " * 1200, add_special_tokens=False).ids) == 100
    assert length.fewest_tokens("q" * 1200) > 300
    assert 5000 < length.fewest_tokens("q" * 1_000_000, 5000) < length.fewest_tokens("q" * 1_000_000)
    assert loaded(normalizer={"type": "NFC"})[0].reach and not BOUNDED[2][0].reach


def test_composition_counts_only_outside_of_ascii() -> None:
    (plain, _), (composed, _) = BOUNDED[:2]
    assert plain.ascii == plain.any > 0
    assert (composed.ascii, composed.any) == (plain.ascii, 4 * plain.any)


def split(behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": False}


BYTE_LEVEL = FILE["pre_tokenizer"]
SWALLOWS = {
    "id": 900, "content": "<|a|>", "single_word": False, "lstrip": False, "rstrip": True, "normalized": False,
    "special": True,
}  # fmt: skip
UNBOUNDED: dict[str, dict[str, Any]] = {
    "strip": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    "shrink": {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
    "pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
    "sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
    "removed": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("Removed"), BYTE_LEVEL]}},
    "no bytes": {"pre_tokenizer": None},
    "rstrip": {"added_tokens": [SWALLOWS]},
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizer_that_may_drop_text_has_no_bound(name: str) -> None:
    length, _ = loaded(**UNBOUNDED[name])
    assert length == TokenLength() and length.fewest_tokens("x" * 100_000) == 0


def test_split_that_keeps_its_pieces_has_a_bound() -> None:
    length, _ = loaded(pre_tokenizer={"type": "Sequence", "pretokenizers": [split("Isolated"), BYTE_LEVEL]})
    assert length.any


def test_vocabulary_that_lacks_letters_has_no_bound() -> None:
    assert of(metaspace()) == TokenLength()

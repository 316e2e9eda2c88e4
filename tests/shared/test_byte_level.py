"""The alphabet of byte-level vocabularies."""

from tokenizers.pre_tokenizers import ByteLevel

from shared.checkpoint import BYTES, spelled


def test_alphabet_is_the_librarys() -> None:
    assert sorted(BYTES) == sorted(ByteLevel.alphabet()) and sorted(BYTES.values()) == list(range(256))


def test_text_is_spelled_as_the_library_spells_it() -> None:
    text = "<｜tool▁call｜> ü\n👍"
    ((found, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert spelled(text) == found and bytes(BYTES[char] for char in found).decode() == text

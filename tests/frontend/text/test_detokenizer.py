"""Detokenizers: for any ids in any pushes, the joined texts equal the decoding of all ids at once."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from frontend.text.detokenizer import REPLACEMENT, OutputText, WindowText
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers as kinds

ENGINES = {
    "byte_level": kinds.byte_level(),
    "byte_fallback": kinds.byte_fallback(),
    "byte_fallback_strip": kinds.byte_fallback(strip=True),
    "metaspace": kinds.metaspace(),
    "wordpiece": kinds.wordpiece(),
}
TABLED = ["byte_level", "byte_fallback", "byte_fallback_strip"]
TRICKY = [
    "héllo €9",
    "👩‍👩‍👧‍👦 family",
    "👍🏽",
    "ﷺ",
    "e\u0301",
    "日本語",
    "\ufffd",
    "a\ufffdb",
    "  two  spaces ",
    "\n\n",
    "🇩🇪🇫🇷",
]
JUNK = [
    b"\xff",
    b"\xc3(",
    b"\xe2\x82",
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xc0\xaf",
    b"\xe2(\xa1",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer.load(kinds.save(engine, root / name)) for name, engine in ENGINES.items()}


@st.composite
def pushes(draw: st.DrawFn, engine: Engine) -> list[list[int]]:
    """Draws ids of every kind, some just outside the vocabulary, in pushes of any size."""
    size = engine.get_vocab_size()
    token = st.integers(0, size + 2) | st.integers(min(250, size // 2), size - 1)
    text = st.sampled_from(TRICKY).map(lambda text: engine.encode(text, add_special_tokens=False).ids)
    ids = [token for run in draw(st.lists(st.lists(token, max_size=5) | text, max_size=5)) for token in run]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(tokenizer: Tokenizer, parts: list[list[int]]) -> str:
    detokenizer = tokenizer.detokenizer()
    texts = []
    for part in parts:
        new = detokenizer.push(part)
        assert len(new) == len(part)
        texts += new
    return "".join(texts) + detokenizer.flush()


@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_texts_joined_equal_decoding_all_ids(kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]) -> None:
    parts = data.draw(pushes(ENGINES[kind]))
    assert stream(tokenizers[kind], parts) == tokenizers[kind].decode(list(chain(*parts)))


@pytest.mark.parametrize("kind", TABLED)
@settings(max_examples=120, deadline=None)
@given(parts=st.lists(st.binary(max_size=4) | st.sampled_from(JUNK), max_size=6))
def test_any_bytes_equal_decoding_all_ids(kind: str, parts: list[bytes], tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    of_byte = {tokenizer.token_bytes(token): token for token in reversed(range(256))}
    ids = [of_byte[bytes([byte])] for byte in b"".join(parts)]
    expected = tokenizer.decode(ids)
    assert stream(tokenizer, [ids]) == stream(tokenizer, [[token] for token in ids]) == expected
    if kind == "byte_level":
        assert expected == b"".join(parts).decode(errors="replace")


@pytest.mark.parametrize("kind", TABLED)
@pytest.mark.parametrize("text", TRICKY)
def test_texts_never_cut_a_character(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = tokenizers[kind].detokenizer()
    texts = [detokenizer.push([token])[0] for token in tokenizers[kind].encode_now([text])[0]]
    assert "".join(texts).count("\ufffd") <= text.count("\ufffd")
    expected = text[1:] if kind == "byte_fallback_strip" and text.startswith(" ") else text
    assert "".join(texts) + detokenizer.flush() == expected


def test_character_arrives_with_the_token_that_completes_it(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode_now(["a😀b"], add_special_tokens=False)[0]
    assert [detokenizer.push([token]) for token in ids] == [["a"], [""], ["😀"], ["b"]]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    of_byte = {tokenizer.token_bytes(token): token for token in range(256)}
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([of_byte[b"\xff"], of_byte[b"\xe2"], of_byte[b"A"]]) == ["\ufffd", "", "\ufffdA"]


def test_special_and_unknown_ids_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    of_byte = {tokenizer.token_bytes(token): token for token in range(256)}
    eos = min(tokenizer.special_ids)
    ids = [of_byte[b"x"], eos, of_byte[b"\xc3"], eos, 10**6, 2**32 - 1, of_byte[b"\xa9"], 2**40, -1]
    assert tokenizer.detokenizer().push(ids) == ["x", "", "", "", "", "", "é", "", ""]
    assert tokenizer.decode(ids) == "xé"


@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_marks_are_shown_and_change_nothing_around_them(
    kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]
) -> None:
    """Other special ids stay hidden. A character is replaced only if a marked token stands between its bytes."""
    tokenizer = tokenizers[kind]
    mark, stand_in = min(tokenizer.special_ids), "\udc81"
    spelling = tokenizer.decode([mark], skip_special=False)
    parts = data.draw(pushes(ENGINES[kind]))
    texts = [part for ids in parts for part in (ids, [mark])]
    detokenizer = tokenizer.detokenizer({spelling: stand_in, "<|no token|>": "x"})
    told = "".join(text for ids in texts for text in detokenizer.push(ids)) + detokenizer.flush()
    assert told.count(stand_in) == sum(ids.count(mark) for ids in texts)
    plain = tokenizer.decode(list(chain(*texts)))
    assert REPLACEMENT in told or told.replace(stand_in, "") == plain


def test_leading_space_is_stripped_only_at_the_start(
    tokenizers: dict[str, Tokenizer],
) -> None:
    ids = tokenizers["byte_fallback"].encode_now(["  a  a"], add_special_tokens=False)[0]
    assert stream(tokenizers["byte_fallback"], [[token] for token in ids]) == "  a  a"
    assert stream(tokenizers["byte_fallback_strip"], [[token] for token in ids]) == " a  a"


def test_output_text_without_stop_strings_releases_everything(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode_now(["the lo"], add_special_tokens=False)[0]
    text = OutputText(tokenizer.detokenizer())
    assert text.push(ids) == (ids, ["the", " ", "lo"], None)
    assert text.finish() == ([], [], None)
    assert text.consumed == len(ids)


@pytest.mark.parametrize("with_last", [True, False])
def test_incomplete_bytes_at_the_end_are_replaced(with_last: bool, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    half = next(token for token in range(256) if tokenizer.token_bytes(token) == b"\xf0")
    text = OutputText(tokenizer.detokenizer())
    if with_last:
        assert text.finish([half]) == ([half], ["\ufffd"], None)
    else:
        assert text.push([half]) == ([half], [""], None)
        assert text.finish() == ([], ["\ufffd"], None)
    assert text.consumed == 1


def test_window_of_other_decoders_stays_short() -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return "".join("\ufffd" if token else "a" for token in ids)

    texts = WindowText(decode, lambda token: False).push([0] * 50 + [1] * 50 + [0])
    assert "".join(texts) == "a" * 50 + "\ufffd" * 50 + "a"
    assert max(sizes) <= 2 * WindowText.MAX_WAITING

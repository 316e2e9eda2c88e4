"""Stop strings: for any pushes, the outcome equals a search in the whole text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.detokenizer import OutputText, Released
from frontend.text.stop_strings import Stops
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text import tokenizers as kinds

WORDS = ["a", "b", "c", "ab", "ba", "aab", "é", "abcabc", "", "caa"]


class Spelled:
    """A detokenizer whose ids index a list of texts; `flush` returns `tail`."""

    def __init__(self, words: Sequence[str], tail: str = "") -> None:
        self.words = words
        self.tail = tail

    def push(self, ids: list[int]) -> list[str]:
        return [self.words[token] for token in ids]

    def flush(self) -> str:
        return self.tail


def expected(texts: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """The oracle: returns the released texts and the stop string that a search in the whole text finds."""
    whole = "".join(texts)
    hits = [(whole.find(stop), len(stop), stop) for stop in stops if stop in whole]
    if not hits:
        return texts, None
    start, length, stop = min(hits)
    kept: list[str] = []
    position = 0
    for text in texts:
        kept.append(text[: max(0, start - position)])
        position += len(text)
        if position >= start + length:
            break
    return kept, stop


def run(text: OutputText, parts: list[list[int]], last: list[int] | None = None) -> tuple[list[Released], str | None]:
    releases = [text.push(part) for part in parts]
    releases.append(text.finish(last))
    return releases, releases[-1][2]


ids_of_words = st.lists(st.integers(0, len(WORDS) - 1), max_size=14)
stop_lists = st.lists(st.text("abcé", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(ids=ids_of_words, stops=stop_lists, data=st.data(), tail=st.sampled_from(["", "", "a", "bc"]))
def test_result_does_not_depend_on_the_pushes(ids: list[int], stops: list[str], data: st.DataObject, tail: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    last = parts.pop()
    texts = [WORDS[token] for token in ids]
    if tail and last:
        texts[-1] += tail
    elif tail:
        texts.append(tail)  # the tail is a text of its own, or joins an id that is still held back
    kept, stop = expected(texts, stops)

    text = OutputText(Spelled(WORDS, tail), Stops(stops))
    releases, found = run(text, parts, last)
    released = [token for ids, _, _ in releases for token in ids]
    assert found == stop
    assert "".join(t for _, texts, _ in releases for t in texts) == "".join(kept)
    assert released == ids[: len(kept)]
    assert text.consumed == len(released)
    assert all(len(ids) == len(texts) for ids, texts, _ in releases[:-1])


@settings(max_examples=200, deadline=None)
@given(string=st.text("ab", max_size=20), stops=stop_lists)
def test_only_a_possible_stop_string_is_held_back(string: str, stops: list[str]) -> None:
    text = OutputText(Spelled("abcé"), Stops(stops))
    out = ""
    for end in range(1, len(string) + 1):
        _, texts, _ = text.push(["abcé".index(string[end - 1])])
        out += "".join(texts)
        so_far = string[:end]
        if any(stop in so_far for stop in stops):
            break
        prefixes = {stop[:size] for stop in stops for size in range(len(stop))}
        held = max(len(prefix) for prefix in prefixes if so_far.endswith(prefix))
        assert out == so_far[: end - held]


@pytest.mark.parametrize(
    ("words", "stops", "kept", "stop"),
    [
        (["Hello", " wor", "ld"], ["world"], ["Hello", " ", ""], "world"),
        (["stop", " now"], ["stop"], [""], "stop"),
        (["a", "a", "a", "b", "c"], ["aab"], ["a", "", "", ""], "aab"),
        (["abab", "abac"], ["abac"], ["abab", ""], "abac"),
        (["x\n", "\n", "y"], ["\n\n", "\n"], ["x"], "\n"),
        (["ab", "c", "x"], ["abcd", "bc"], ["a", ""], "bc"),
        (["ab", "c", "d"], ["abcd", "bc"], ["", "", ""], "abcd"),
        (["ab", "c"], ["abcd", "bc"], ["a", ""], "bc"),
        (["日", "本", "語", "!"], ["本語"], ["日", "", ""], "本語"),
        (["x", "", "y", "", "z"], ["yz"], ["x", "", "", "", ""], "yz"),
        (["]", "-", "^", "\\"], ["^\\", "]["], ["]", "-", "", ""], "^\\"),
        (["almost sto", "rm"], ["stop"], ["almost sto", "rm"], None),
    ],
)
def test_stop_strings_of_examples(words: list[str], stops: list[str], kept: list[str], stop: str | None) -> None:
    ids = list(range(len(words)))
    for parts in ([ids], [[token] for token in ids]):
        releases, found = run(OutputText(Spelled(words), Stops(stops)), parts)
        assert [text for _, texts, _ in releases for text in texts] == kept
        assert found == stop


def test_found_stop_string_ends_the_stream() -> None:
    text = OutputText(Spelled(["a", "END", "z"]), Stops(["END"]))
    assert text.push([0]) == ([0], ["a"], None)
    assert text.push([1, 2]) == ([1], [""], "END")
    assert text.push([2]) == ([], [], "END")
    assert text.finish([2]) == ([], [], "END")
    assert text.consumed == 2


def test_id_with_partly_held_text_is_held() -> None:
    text = OutputText(Spelled(["one\n", "two"]), Stops(["\n\n"]))
    assert text.push([0]) == ([], [], None)
    assert text.push([1]) == ([0, 1], ["one\n", "two"], None)


def test_stop_string_in_the_flushed_end_is_found() -> None:
    text = OutputText(Spelled(["x"], tail="\ufffd"), Stops(["\ufffd"]))
    assert text.push([0]) == ([0], ["x"], None)
    assert text.finish() == ([], [""], "\ufffd")


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_empty_stop_string_is_refused(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        Stops(strings)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=80, deadline=None)
@given(string=st.text("the lo€é😀\n", max_size=12), stop=st.sampled_from(["€", "😀😀", "e l", "é\n", "the", "\n"]))
def test_stop_strings_with_real_tokenizers(kind: str, string: str, stop: str, real: dict[str, Tokenizer]) -> None:
    tokenizer = real[kind]
    ids = tokenizer.encode_now([string], add_special_tokens=False)[0]
    releases, found = run(OutputText(tokenizer.detokenizer(), Stops([stop])), [[token] for token in ids])
    assert "".join(t for _, texts, _ in releases for t in texts) == string.split(stop)[0]
    assert found == (stop if stop in string else None)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    engines = {"byte_level": kinds.byte_level(), "byte_fallback": kinds.byte_fallback()}
    return {name: Tokenizer.load(kinds.save(engine, root / name)) for name, engine in engines.items()}

"""Drafts from earlier requests: from the same scope only, within a bound of memory, and without a trace in any byte."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.worker.scheduler.harness import Rig, reference
from worker.kv_cache import recent_texts
from worker.kv_cache.recent_texts import GRAM_LENGTHS, LONGEST, SCOPE_TOKENS, RecentTexts, ScopedTexts
from worker.scheduler.ngrams import NgramDrafter

FREE = 0.0


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 100_000) for _ in range(count)]


def test_text_of_an_earlier_request_is_proposed() -> None:
    texts, text = RecentTexts(), words(1, 100)
    texts.add(text)
    assert NgramDrafter(texts).propose([*words(2, 30), *text[40:56]], 4, FREE) == tuple(text[56:60])
    assert NgramDrafter(texts).propose([*words(3, 30), *text[20:24]], 4, FREE) == (), "four tokens are too few"
    few = [NgramDrafter(texts).propose([*words(3, 30), *text[at : at + 5]], 1, FREE) for at in range(60)]
    assert sum(drafts == (text[at + 5],) for at, drafts in enumerate(few)) > 40, "five are enough"


def test_latest_of_equal_texts_is_found() -> None:
    texts, begin = RecentTexts(), words(1, 20)
    texts.add([*begin, *words(2, 40)])
    texts.add([*begin, *words(3, 40)])
    length, place = texts.find(begin) or (0, 0)
    assert length == LONGEST and texts.ids[place : place + 5].tolist() == words(3, 5)


def test_session_that_repeats_its_prefix_is_added_once() -> None:
    texts, session, sizes = RecentTexts(), words(1, 600), []
    for turn in range(8):
        session = [*session, *words(10 + turn, 100)]
        texts.add(session)
        sizes.append(texts._end)
    assert sizes[0] == 700 and all(after - before <= 100 + LONGEST for before, after in pairwise(sizes))
    found = [texts.find(session[:at]) for at in range(LONGEST, len(session) - 1)]
    right = sum(one is not None and texts.ids[one[1]] == session[at] for at, one in enumerate(found, LONGEST))
    assert right > 0.9 * len(found)
    end = texts._end
    texts.add(session)
    assert texts._end == end, "nothing is new"


def test_texts_grow_and_then_overwrite_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_texts, "SCOPE_TOKENS", 4096)
    texts = RecentTexts()
    for seed in range(40):
        texts.add(words(seed, 300))
        assert texts.capacity <= 4096
        assert texts.find(words(seed, 300)[:200]), "the latest text is there"
    assert texts.find(words(0, 300)[:200]) is None
    texts.add(words(99, 10_000))
    assert texts.find(words(99, 10_000)[:9000]) and texts.find(words(99, 10_000)[:1000]) is None
    assert texts.capacity == 4096


def test_scopes_share_no_text_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes, text = ScopedTexts(), words(1, 100)
    scopes.add(("a", ""), text)
    assert scopes.of(("b", "")).find(text[:50]) is None and scopes.of(("a", "")).find(text[:50])
    before = scopes.of(("a", "")).ids.tobytes()
    scopes.add(("b", ""), words(2, 900))
    assert scopes.of(("a", "")).ids.tobytes() == before, "another scope's texts change nothing here"
    monkeypatch.setattr(recent_texts, "ALL_TOKENS", 8192)
    held = scopes.of(("a", ""))
    for name in range(20):
        scopes.add((f"scope {name}", ""), words(name, 900))
    assert sum(one.capacity for one in scopes._scopes.values()) <= 8192
    assert not held.ids and held.find(text[:50]) is None, "a forgotten scope's texts are gone for those who hold it"
    monkeypatch.setattr(recent_texts, "MOST_SCOPES", 3)
    for name in range(6):
        scopes.of(("empty", str(name)))
    assert len(scopes._scopes) == 3


def test_bytes_per_token_are_what_is_documented() -> None:
    texts = RecentTexts()
    texts.add(words(1, SCOPE_TOKENS))
    nbytes = texts.ids.itemsize * len(texts.ids) + sum(table.nbytes for table in texts._tables.values())
    assert nbytes == recent_texts.BYTES_PER_TOKEN * texts.capacity and texts.capacity <= SCOPE_TOKENS


def test_index_agrees_with_a_plain_search() -> None:
    draw = random.Random(4)
    texts, text = RecentTexts(), [draw.randrange(6) for _ in range(700)]
    texts.add(text)
    finds = [(at, found) for at in range(LONGEST, 700) if (found := texts.find(text[:at]))]
    assert len(finds) > 600
    for at, (length, place) in finds:
        assert length in GRAM_LENGTHS and text[place - length : place] == text[at - length : at]
    assert texts._view.dtype == np.int32


def test_adding_a_text_of_many_known_pieces_is_bounded() -> None:
    texts, tokens = RecentTexts(), words(1, 5000)
    for begin in range(0, 5000, 50):
        texts.add(tokens[begin : begin + 100])
    texts.add(tokens)
    assert texts.find(tokens[:4000])


class Repeats(Rig):
    """Runs requests one after another, and tells what drafts they had."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"pages": 65, "page_size": 32, "max_draft_tokens": 7, "max_seq_len": 256, **settings})

    def accepted(self, prompt: list[int], salt: str = "", tenant: str = "") -> int:
        sequence = self.submit(prompt, 60, ignore_eos=True, cache_salt=salt, tenant=tenant)
        tokens = reference(sequence, self.config)[0]
        while self.scheduler.has_work:
            self.step()
        assert sequence.tokens == tokens, "drafts change no token"
        return sequence.history.accepted


@pytest.mark.parametrize(
    "scopes", [({"tenant": "a"}, {"tenant": "b"}), ({"salt": "a"}, {"salt": "b"}), ({"tenant": "a"}, {"salt": "a"})]
)
def test_answer_that_was_given_before_is_drafted_for_the_same_scope_only(scopes: tuple[dict[str, str], ...]) -> None:
    rig, prompt = Repeats(), words(1, 40)
    one, other = scopes
    first = rig.accepted(prompt, **one)
    others = rig.accepted(prompt, **other)
    assert rig.accepted(prompt, **one) > max(first, 20)
    assert Repeats().accepted(prompt, **other) == others, "what another scope was answered leaves no trace"


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"max_draft_tokens": 0}])
def test_nothing_is_kept_without_a_prefix_cache_or_drafts(settings: dict[str, Any]) -> None:
    rig, prompt = Repeats(**settings), words(1, 40)
    assert rig.accepted(prompt) == rig.accepted(prompt)
    assert rig.scheduler.speculation is None or rig.scheduler.speculation.texts is None


def test_reset_of_the_prefix_cache_forgets_the_texts() -> None:
    rig, prompt = Repeats(), words(1, 40)
    first = rig.accepted(prompt)
    rig.scheduler.reset_prefix_cache(1)
    assert rig.accepted(prompt) == first

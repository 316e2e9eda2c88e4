"""A consumer that follows the journal of K/V events knows exactly the pages that the prefix cache finds."""

import random
from collections.abc import Iterable

import msgspec
import pytest

from shared.messages import Adapter
from shared.prefix_identity import PrefixIdentity
from tests.worker.scheduler.harness import Rig
from worker.engine import kv_events as journals
from worker.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    PageJournal,
    block_hash,
)
from worker.kv_cache.pages import PagePool
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import AdapterUse, PrefixState, Sequence

PAGE = 4


class Consumer:
    """Follows the events as a router does: keeps the tokens of each known block, by hash."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def follow(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    before = [] if event.parent_block_hash is None else self.tokens[event.parent_block_hash]
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    for index, block in enumerate(event.block_hashes):
                        before = [*before, *event.token_ids[index * PAGE : (index + 1) * PAGE]]
                        self.tokens[block] = before
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.tokens[block]
                case AllBlocksCleared():
                    self.tokens.clear()


def published(paging: Paging, sequence: Sequence) -> Sequence:
    """Gives the sequence pages, and publishes all full pages as if they were computed."""
    assert paging.claim(sequence, alone=True)
    paging.publish(sequence, sequence.computed_tokens, len(sequence.tokens))
    return sequence


def followed(pages: int = 40) -> tuple[Rig, Paging, PageJournal]:
    paging = Paging([PagePool(pages, PAGE)], prefix_cache=True, watermark=0.0, chunk=64)
    journal = PageJournal.of(paging)
    assert journal.take() == [AllBlocksCleared()], "a new process has an empty cache"
    return Rig(), paging, journal


def test_consumer_knows_what_the_cache_finds_under_random_use() -> None:
    drawn = random.Random(5)
    rig = Rig(pages=24)
    paging, consumer = rig.scheduler.state.paging, Consumer()
    journal, pool = PageJournal.of(paging), paging.pools[0]
    cleared = stored = removed = 0
    for turn in range(300):
        if drawn.random() < 0.5:
            start = drawn.randrange(3)
            rig.submit([start] * drawn.randrange(1, 20) + [drawn.randrange(9) for _ in range(5)], drawn.randrange(1, 9))
        if turn % 97 == 96:
            rig.scheduler.reset_prefix_cache(turn)
        rig.step()
        events = journal.take()
        consumer.follow(events)
        cleared += sum(isinstance(event, AllBlocksCleared) for event in events)
        stored += sum(isinstance(event, BlockStored) for event in events)
        removed += sum(isinstance(event, BlockRemoved) for event in events)
        found = {block_hash(digest) for digest in journal.found}
        assert consumer.tokens.keys() == found
        assert all(pool.find(digest) is not None for digest in journal.found)
        if turn < 96:
            assert len(found) == sum(pool.is_published(page) for page in range(1, pool.usable + 1))
    assert cleared == 4 and stored > 50 and removed > 20


def test_blocks_have_the_tokens_of_their_prompt_and_equal_prefixes_are_told_once() -> None:
    rig, paging, journal = followed()
    tokens = list(range(13))
    published(paging, rig.sequence(tokens))
    published(paging, rig.sequence([*tokens[:8], 99, 98, 97, 96]))
    first, second = journal.take()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.token_ids, first.parent_block_hash, first.block_size) == (tokens[:12], None, PAGE)
    assert (second.token_ids, second.parent_block_hash) == ([99, 98, 97, 96], first.block_hashes[1])
    assert first.extra_keys is None and first.lora_name is None


def test_sequence_that_runs_while_the_cache_is_cleared_stores_nothing_more() -> None:
    rig, paging, journal = followed()
    early, late = rig.sequence(12), rig.sequence(12)
    for sequence in (early, late):
        assert paging.claim(sequence, alone=True)
    paging.publish(early, 0, 4)
    assert len(journal.take()) == 1
    paging.clear_prefixes()
    paging.publish(early, 4, 12)
    paging.publish(late, 0, 12)
    assert journal.take() == [AllBlocksCleared()]
    fresh = published(paging, rig.sequence(early.tokens))
    assert fresh.computed_tokens == 0 and len(journal.take()) == 1


def test_two_that_computed_the_same_are_told_once() -> None:
    rig, paging, journal = followed()
    twins = [rig.sequence(list(range(8))) for _ in range(2)]
    for twin in twins:
        assert paging.claim(twin, alone=True)
    for twin in twins:
        paging.publish(twin, 0, 8)
    assert len(journal.take()) == 1
    paging.free(twins[0])
    paging.free(twins[1])
    assert journal.take() == []


def test_salts_and_images_are_hashed_and_adapters_are_named() -> None:
    rig, paging, journal = followed()
    adapter = Adapter("poet", "/x", "ab" * 32)
    salted, adapted, seen = rig.sequence(8), rig.sequence(8), rig.sequence(8)
    salted.prefix = PrefixState(PrefixIdentity("secret").text)
    adapted.adapter, adapted.prefix = AdapterUse(adapter), PrefixState(PrefixIdentity(adapter=adapter).text)
    seen.prefix = PrefixState(mark=lambda begin, end: b"image" if begin == PAGE else b"")
    for sequence in (salted, adapted, seen):
        published(paging, sequence)
    events = journal.take()
    told = [event for event in events if isinstance(event, BlockStored)]
    assert len(told) == len(events) == 3 and b"secret" not in msgspec.msgpack.encode(told)
    keys = told[0].extra_keys
    assert keys is not None and keys[0] == keys[1] and keys[0] is not None and len(keys[0]) == 1
    assert (told[1].lora_name, told[1].extra_keys) == ("poet", None)
    assert told[2].extra_keys is not None and told[2].extra_keys[0] is None and told[2].extra_keys[1] is not None


def test_a_publisher_that_is_late_loses_no_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MAX_PENDING", 5)
    rig, paging, journal = followed()
    consumer = Consumer()
    for begin in range(0, 70, 10):  # seven events, one for each prompt
        paging.free(published(paging, rig.sequence(list(range(begin, begin + 8)))))
    consumer.follow(journal.take())
    assert 0 < len(consumer.tokens) < 14, "older pages are forgotten"
    assert consumer.tokens.keys() == {block_hash(digest) for digest in journal.found}
    published(paging, rig.sequence(150))
    consumer.follow(journal.take())
    assert consumer.tokens.keys() == {block_hash(digest) for digest in journal.found}


def test_batch_is_an_array_and_its_events_are_maps() -> None:
    stored = BlockStored([7, 8], 6, [1, 2, 3, 4], 2, None, "GPU", None)
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [stored, AllBlocksCleared()])))
    assert batch == [
        1.5,
        [
            {
                "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": 6, "token_ids": [1, 2, 3, 4],
                "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
            },
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]  # fmt: skip

"""The messages about K/V pages, as vLLM publishes them: a batch is an array in msgpack, and its events are maps.

The names of classes and fields are vLLM's (`vllm/distributed/kv_events.py`), and so are the words of its consumers: a
block is a page. Fields that are left out have their defaults.
"""

import msgspec

MEDIUM = "GPU"  # vLLM's word for pages that a step reads where they are, whatever the device


class _Event(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """The field `type` has the name of the class."""


class BlockStored(_Event, frozen=True):
    """Pages that were computed and can be found now, each the continuation of the one before.

    parent_block_hash: of the page before the first; None if a prompt begins with the first
    token_ids: of all pages, len(block_hashes) * block_size
    lora_id: always None; adapters have names
    extra_keys: of each page what it is hashed with besides tokens; None if none has any
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event, frozen=True):
    """Pages that cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """No page that was stored before this event can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What happened in this order. ts: seconds since 1970"""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Returns the 64 bits of a page's digest that stand for the page in events."""
    return int.from_bytes(digest[-8:], "big")

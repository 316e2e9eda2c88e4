"""The messages about K/V pages, in vLLM's format: a batch is an array in msgpack, and its events are maps.

The names of classes and fields are those of vLLM (`vllm/distributed/kv_events.py`), because consumers expect them. A
block is a page. Fields with their default values are left out of a message.
"""

import msgspec

MEDIUM = "GPU"  # vLLM's name for pages that steps read directly; used for the CPU, too


class _Event(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """The base class of events. In a message, the field `type` is the name of the class."""


class BlockStored(_Event, frozen=True):
    """Consecutive pages of a prompt that were computed and are in the prefix cache now.

    parent_block_hash: the hash of the page before the first one; None if the first page begins the prompt
    token_ids: the tokens of all pages, len(block_hashes) * block_size
    lora_id: always None, because adapters have names
    extra_keys: for each page, hashes of the other data in its digest (salt, pictures); None if no page has any
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
    """Pages that are no longer in the prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """The prefix cache was emptied: no page that was stored before this event can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events, in the order in which they happened. ts: seconds since 1970"""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Returns the 64 bits of a page's digest that identify the page in events."""
    return int.from_bytes(digest[-8:], "big")

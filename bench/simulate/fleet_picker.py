"""A gateway's endpoint picker in front of a simulated fleet: it follows the K/V events of all workers.

From the events that `--kv-events-endpoint` publishes, it knows the pages in each worker's prefix cache. It sends a
request to the worker with the least work, which is the worker's load minus the prompt tokens that its cache has. The
picker sees all requests, so it also knows all streams.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.simulate.fleet_routers import FleetRouter
from shared.wire import unpack_u32
from worker.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class PageIndex:
    """Records which workers cache which pages. A page's key is a hash of all tokens up to the page's end."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        self._keys: dict[int, dict[int, int]] = {}  # worker → the worker's block hash → the page's key

    def take(self, worker: int, events: Iterable[Event]) -> None:
        """Updates the index by a worker's events, in the order of the events."""
        keys = self._keys.setdefault(worker, {})
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._remove(worker, keys, list(keys))
                case BlockRemoved():
                    self._remove(worker, keys, event.block_hashes)
                case BlockStored():
                    parent = 0 if event.parent_block_hash is None else keys.get(event.parent_block_hash)
                    if parent is not None:
                        found = page_keys(array("I", event.token_ids), event.block_size, parent)
                        for block, key in zip(event.block_hashes, found, strict=True):
                            keys[block] = key
                            self._holders.setdefault(key, set()).add(worker)

    def _remove(self, worker: int, keys: dict[int, int], blocks: Iterable[int]) -> None:
        for block in blocks:
            key = keys.pop(block, None)
            if key is not None and (holders := self._holders.get(key)):
                holders.discard(worker)
                if not holders:
                    del self._holders[key]

    def saved(self, prompt: "array[int]", page_size: int) -> dict[int, int]:
        """Returns how many of a prompt's first tokens each worker has cached, in whole pages; omits workers with 0."""
        saved: dict[int, int] = {}
        having: set[int] | None = None
        for page, key in enumerate(page_keys(prompt, page_size), 1):
            holders = self._holders.get(key, set())
            having = holders if having is None else having & holders
            if not having:
                break
            saved |= dict.fromkeys(having, page * page_size)
        return saved


def page_keys(tokens: "array[int]", page_size: int, key: int = 0) -> Iterator[int]:
    """Yields the key of each whole page. key: the key of the page before the first one; 0 if there is none"""
    for end in range(page_size, len(tokens) + 1, page_size):
        key = hash((key, tokens[end - page_size : end].tobytes()))
        yield key


class FleetPicker(FleetRouter):
    """Chooses workers for the streams of all frontends."""

    def __init__(self, workers: int, clock: Callable[[], float], page_size: int) -> None:
        super().__init__(range(workers), clock, homes=0)
        self.index, self._page_size = PageIndex(), page_size

    def _pick(self, stream: Any, loads: list[int]) -> tuple[int, int]:
        prompt = array("I", unpack_u32(stream.submit.prompt).tolist())
        saved = self.index.saved(prompt, self._page_size)
        left = [load - saved.get(one.index, 0) for one, load in zip(self._ready, loads, strict=True)]
        at = left.index(min(left))
        return at, saved.get(self._ready[at].index, 0)

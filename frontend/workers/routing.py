"""Which of several workers gets a request: the least loaded, unless one that has its prompt's beginning in its prefix
cache is nearly as free.

Pure: counts and names in, a choice out. Load is in tokens that may still have to be computed.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from frontend.workers.stream import Stream
from shared.messages import Status

DEPTHS = (16384, 4096, 1024, 256, 64)  # tokens; beginnings of these lengths are remembered
REMEMBERED = 20_000  # beginnings
MARGIN = 1024  # tokens more than the least loaded's that a known beginning is worth; or a quarter of its load
EXPECTED = 1024  # most new tokens that a request is expected to need: few use all of their max_tokens
STRANGER = 256  # tokens that another frontend's running request may need


def load(streams: Iterable[Stream], status: Status | None) -> int:
    """Tokens that a worker has before it: ours to the token, other frontends' by what Status says of them."""
    count = ours = prompts = 0
    for stream in streams:
        count += 1
        ours += min(EXPECTED, max(0, stream.submit.sampling.max_tokens - len(stream.output)))
        if not stream.output:
            prompts += len(stream.submit.prompt) // 4
    if status is None:
        return ours + prompts
    strangers = max(0, status.running + status.waiting - count)
    return ours + prompts + strangers * STRANGER + max(0, status.waiting_tokens - prompts)


def choose(loads: Sequence[int], knowing: Iterable[Collection[int]] = (), turn: int = 0) -> int:
    """Index of the worker to take.

    `loads[i]` is worker i's load; `knowing` names the workers that computed the request's beginning, the longest
    beginning first. Of equals the one whose turn it is: the first at or after `turn`, around the circle.
    """
    least = min(loads)
    bearable = least + max(MARGIN, least // 4)
    for workers in knowing:
        near = [i for i in workers if loads[i] <= bearable]
        if near:
            return min(near, key=lambda i: (loads[i], i))
    return min(range(len(loads)), key=lambda i: (loads[i], (i - turn) % len(loads)))


def prefix_hashes(prompt: bytes, cache_salt: str) -> list[int]:
    """Hashes of a packed prompt's beginnings, the longest first; equal salts share."""
    return [hash((cache_salt, prompt[: 4 * depth])) for depth in DEPTHS if len(prompt) >= 4 * depth]


class PrefixAffinity:
    """Who computed what lately: the most recent `size` beginnings, each with the names of its workers."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._known: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def knowing(self, keys: Iterable[int]) -> list[Collection[str]]:
        return [self._known[key] for key in keys if key in self._known]

    def remember(self, keys: Iterable[int], worker: str) -> None:
        for key in keys:
            self._known.setdefault(key, set()).add(worker)
            self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Its cache is gone."""
        for workers in self._known.values():
            workers.discard(worker)

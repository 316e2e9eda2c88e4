"""Chooses the worker for a request: the least loaded one, or one nearly as free that has cached a prefix of the prompt.

Pure: counts and names in, a choice out. Load is in tokens that may still have to be computed.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from frontend.workers.stream import Stream
from shared.messages import Status

PREFIX_LENGTHS = (16384, 4096, 1024, 256, 64)  # tokens; prefixes of these lengths are remembered
MAX_PREFIXES = 20_000
# A worker with a cached prefix is preferred while its load exceeds the least load by at most so many tokens, or by a
# quarter of the least load if that is more.
AFFINITY_MARGIN = 1024
EXPECTED_TOKENS = 1024  # a request is expected to need no more new tokens: few use all of their max_tokens
OTHER_REQUEST_TOKENS = 256  # tokens that another frontend's request is expected to need


def load(streams: Iterable[Stream], status: Status | None) -> int:
    """Counts the tokens left to a worker: exact for our `streams`, estimated from `status` for other frontends."""
    count = ours = prompts = 0
    for stream in streams:
        count += 1
        ours += min(EXPECTED_TOKENS, max(0, stream.submit.sampling.max_tokens - len(stream.output)))
        if not stream.output:
            prompts += len(stream.submit.prompt) // 4
    if status is None:
        return ours + prompts
    others = max(0, status.running + status.waiting - count)
    return ours + prompts + others * OTHER_REQUEST_TOKENS + max(0, status.waiting_tokens - prompts)


def choose(loads: Sequence[int], cached_by: Iterable[Collection[int]] = (), turn: int = 0) -> int:
    """Returns the index of the worker to take.

    loads: `loads[i]` is the load of worker i
    cached_by: the workers that computed a prefix of the request, for the longest prefix first
    turn: among equals the first worker at or after this index is taken, cyclically
    """
    least = min(loads)
    limit = least + max(AFFINITY_MARGIN, least // 4)
    for workers in cached_by:
        near = [i for i in workers if loads[i] <= limit]
        if near:
            return min(near, key=lambda i: (loads[i], i))
    return min(range(len(loads)), key=lambda i: (loads[i], (i - turn) % len(loads)))


def prefix_hashes(prompt: bytes, identity: str) -> list[int]:
    """Hashes the prefixes of a packed prompt, the longest first. identity: the text of a PrefixIdentity."""
    return [hash((identity, prompt[: 4 * length])) for length in PREFIX_LENGTHS if len(prompt) >= 4 * length]


class PrefixAffinity:
    """Remembers which workers computed which prefix, for the `size` most recent prefixes."""

    def __init__(self, size: int = MAX_PREFIXES) -> None:
        self._size = size
        self._workers: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def workers_with(self, hashes: Iterable[int]) -> list[Collection[str]]:
        """Returns the names of the workers for each known prefix, in the order of `hashes`."""
        return [self._workers[prefix] for prefix in hashes if prefix in self._workers]

    def remember(self, hashes: Iterable[int], worker: str) -> None:
        for prefix in hashes:
            self._workers.setdefault(prefix, set()).add(worker)
            self._workers.move_to_end(prefix)
        while len(self._workers) > self._size:
            self._workers.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Forgets the worker's prefixes, as its cache is gone."""
        for workers in self._workers.values():
            workers.discard(worker)


class Router:
    """Chooses the worker of each request, and remembers it for requests with the same prefix."""

    def __init__(self) -> None:
        self._affinity, self._turn = PrefixAffinity(), 0

    def choose(self, prompt: bytes, identity: str, loads: Mapping[str, int]) -> int:
        """Returns the position in `loads` of the worker to take. identity: the text of a PrefixIdentity.

        loads: worker → its load
        """
        hashes, position = prefix_hashes(prompt, identity), {name: at for at, name in enumerate(loads)}
        cached_by = [
            [position[name] for name in names if name in position] for names in self._affinity.workers_with(hashes)
        ]
        chosen = choose(list(loads.values()), cached_by, self._turn)
        self._turn = chosen + 1
        self._affinity.remember(hashes, list(loads)[chosen])
        return chosen

    def forget(self, worker: str) -> None:
        """Forgets the worker's prefixes, as its cache is gone."""
        self._affinity.forget(worker)

"""Chooses the worker for a request: the least loaded one, or one nearly as free that has cached a prefix of the prompt.

Pure: counts and names in, a choice out. Load is in tokens that may still have to be computed.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat

from frontend.workers.stream import Stream
from shared.messages import Status

PREFIX_LENGTHS = (16384, 8192, 4096, 2048, 1024, 512, 256, 64)  # tokens; prefixes of these lengths are remembered
MAX_PREFIXES = 20_000
KEY_TOKENS = 256  # the first tokens of a prompt, which decide its homes
HOMES = 2
MAX_HOMES = 4096  # keys whose homes are remembered
NOTHING: Mapping[Stream, int] = {}
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # multiplication by it spreads the bits of a key over its weight
# A worker with a cached prefix is preferred while its load exceeds the least load by at most so many tokens, or by a
# quarter of the least load, or by the tokens that the prefix saves, if that is more.
AFFINITY_MARGIN = 1024
EXPECTED_TOKENS = 1024  # a request is expected to need no more new tokens: few use all of their max_tokens
OTHER_REQUEST_TOKENS = 256  # tokens that another frontend's request is expected to need


def load(streams: Iterable[Stream], status: Status | None, saved: Mapping[Stream, int] = NOTHING) -> int:
    """Counts the tokens left to a worker: exact for our `streams`, estimated from `status` for other frontends.

    saved: tokens of a stream's prompt that are expected to be in the worker's prefix cache
    """
    count = ours = prompts = cached = 0
    for stream in streams:
        count += 1
        ours += min(EXPECTED_TOKENS, max(0, stream.submit.sampling.max_tokens - len(stream.output)))
        if not stream.output:
            prompts += len(stream.submit.prompt) // 4
            cached += saved.get(stream, 0)
    if status is None:
        return ours + prompts - cached
    others = max(0, status.running + status.waiting - count)
    return ours + prompts - cached + others * OTHER_REQUEST_TOKENS + max(0, status.waiting_tokens - prompts)


def choose(
    loads: Sequence[int],
    cached_by: Iterable[Collection[int]] = (),
    turn: int = 0,
    saved: Iterable[int] = repeat(0),
    homes: Sequence[int] = (),
    hope: int = 0,
) -> int:
    """Returns the index of the worker to take.

    loads: `loads[i]` is the load of worker i
    cached_by: workers that this frontend sent a prefix of the request before, the best ones first
    turn: among equals the first worker at or after this index is taken, cyclically
    saved: how many tokens each of `cached_by` need not compute again; among equals of one the first is taken
    homes: workers that other frontends may have sent a prefix of the request
    hope: how many tokens a home saves at most; while its load exceeds the least load by more, it is not taken
    """
    least = min(loads)
    margin = max(AFFINITY_MARGIN, least // 4)
    for workers, tokens in zip(cached_by, saved, strict=False):
        near = [i for i in workers if loads[i] <= least + max(margin, tokens)]
        if near:
            return min(near, key=loads.__getitem__)
    near = [i for i in homes if loads[i] <= least + hope]
    if near:
        return min(near, key=loads.__getitem__)
    try:
        return loads.index(least, turn % len(loads))
    except ValueError:
        return loads.index(least)


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

    def longest(self, hashes: Sequence[int], worker: str) -> int:
        """Returns the length of the longest of these prefixes that the worker has; 0 if it has none."""
        lengths = PREFIX_LENGTHS[len(PREFIX_LENGTHS) - len(hashes) :]
        both = zip(lengths, hashes, strict=True)
        return next((length for length, prefix in both if worker in self._workers.get(prefix, ())), 0)

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


def seed_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def homes(key: bytes, seeds: Sequence[int], most: int = HOMES) -> list[int]:
    """Returns the positions of the `most` workers with the highest random weights for a key (rendezvous hashing).

    Every frontend finds the same ones. When a worker comes or goes, only the keys change their homes that it gains or
    had.

    key: 8 bytes
    seeds: of the workers' names
    """
    number = int.from_bytes(key, "big")
    weights, found = [(seed ^ number) * _MIX & _MASK for seed in seeds], list[int]()
    for _ in range(min(most, len(weights))):
        found.append(weights.index(max(weights)))
        weights[found[-1]] = -1
    return found


class Router:
    """Chooses the worker of each request.

    First come workers that this frontend has sent a prefix of the prompt, then the homes of its first tokens, which all
    frontends agree on, then the least loaded one.
    """

    def __init__(self, most_homes: int = HOMES) -> None:
        """most_homes: of a prefix; 0 means that frontends learn prefixes each alone (the simulator compares)"""
        self._most_homes = most_homes
        self._affinity, self._turn = PrefixAffinity(), 0
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()  # by key; the latest ones
        self._names: list[str] = []  # of the workers that these are for
        self._position: dict[str, int] = {}
        self._seeds: list[int] = []

    def choose(self, prompt: bytes, identity: str, names: list[str], loads: Sequence[int]) -> tuple[int, int]:
        """Returns the position of the worker to take, and how many tokens of the prompt it is expected to have cached.

        identity: the text of a PrefixIdentity
        loads: of the workers with these names
        """
        if names != self._names:
            self._know(names)
        hashes = prefix_hashes(prompt, identity)
        known, lengths = self._known(hashes)
        home = self._home(prompt, identity) if hashes and self._most_homes else ()
        chosen = choose(loads, known, self._turn, lengths, home, len(prompt) // 4)
        self._turn = chosen + 1
        saved = self._affinity.longest(hashes, names[chosen])
        self._affinity.remember(hashes, names[chosen])
        return chosen, saved

    def _know(self, names: Sequence[str]) -> None:
        """Notes that there are these workers now, in this order."""
        self._names, self._position = [*names], {name: at for at, name in enumerate(names)}
        self._seeds = [seed_of(name) for name in names]
        self._homes.clear()

    def _known(self, hashes: Sequence[int]) -> tuple[list[Collection[int]], list[int]]:
        """Returns the workers that this frontend sent a prefix of the prompt, the best ones first, and what each of
        these prefixes saves in tokens."""
        position, lengths = self._position, PREFIX_LENGTHS[len(PREFIX_LENGTHS) - len(hashes) :]
        known = [
            (sorted([position[name] for name in workers if name in position]), length)
            for length, prefix in zip(lengths, hashes, strict=True)
            for workers in self._affinity.workers_with([prefix])
        ]
        return [who for who, _ in known], [length for _, length in known]

    def _home(self, prompt: bytes, identity: str) -> list[int]:
        key = blake2b(prompt[: 4 * KEY_TOKENS], key=_key(identity), digest_size=8).digest()
        found = self._homes[key] = self._homes.pop(key, []) or homes(key, self._seeds, self._most_homes)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return found

    def forget(self, worker: str) -> None:
        """Forgets the worker's prefixes, as its cache is gone."""
        self._affinity.forget(worker)


def _key(identity: str) -> bytes:
    """Returns a key of at most 64 bytes for blake2b."""
    return blake2b(identity.encode(), digest_size=16).digest()

"""Chooses the worker for a request: the least loaded one, or a nearly as free one with a cached prefix of the prompt.

Does no I/O: takes counts and names, and returns a choice. A load is a number of tokens that may have to be computed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import nlargest
from itertools import repeat

from frontend.workers.stream import Stream
from shared.messages import EXPECTED_TOKENS, CachedPrefixes, Prefill, Status
from shared.prefix_identity import PREFIX_LENGTHS, prefix_keys
from shared.wire import unpack_u32

MAX_PREFIXES = 20_000
# The first tokens of a prompt, hashed, are its key, which decides its homes: the workers that its prefix is sent to.
KEY_TOKENS = 256
HOMES = 8  # homes of a key, tried in pairs: two workers get all prompts with this key while their load allows
MAX_HOMES = 4096  # number of keys whose homes are remembered
NOTHING: Mapping[Stream, int] = {}
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # multiplying by _MIX mixes the bits of keys, see homes()
# A worker with a cached prefix is preferred while its load exceeds the least load by at most this many tokens, a
# quarter of the least load, or the tokens that the prefix saves, whichever is most.
AFFINITY_MARGIN = 1024


def load(streams: Iterable[Stream], status: Status | None, saved: Mapping[Stream, int] = NOTHING) -> int:
    """Counts the tokens that a worker still has to compute: for our `streams`, and for other frontends by its `status`.

    saved: how many prompt tokens of a stream are expected to be in the worker's prefix cache
    """
    tokens = cached = 0
    for stream in streams:
        if stream.submit.prefill is not Prefill.ONLY:
            tokens += min(EXPECTED_TOKENS, max(0, stream.submit.sampling.max_tokens - len(stream.output)))
        if not stream.output:
            tokens += len(stream.submit.prompt) // 4
            cached += saved.get(stream, 0)
    if status is None or status.expected_tokens <= tokens:
        return tokens - cached
    others, found = status.expected_tokens - tokens, status.prefixes.saved_tokens
    return tokens - cached + others * max(0, status.expected_tokens - found) // status.expected_tokens


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
    cached_by: sets of workers that have a prefix of the prompt, those with the longest prefix first
    turn: if several workers have the least load, the first of them from this index on is taken, cyclically
    saved: for each set in `cached_by`, how many tokens its workers need not compute again
    homes: workers to which other frontends may have sent a prefix of the prompt, in pairs, the best pair first
    hope: how many tokens a home may save; a home is not taken if its load exceeds the least load by more than this
    """
    least = min(loads)
    margin = max(AFFINITY_MARGIN, least // 4)
    for workers, tokens in zip(cached_by, saved, strict=False):
        near = [i for i in workers if loads[i] <= least + max(margin, tokens)]
        if near:
            return min(near, key=loads.__getitem__)
    for at in range(0, len(homes), 2):
        near = [i for i in homes[at : at + 2] if loads[i] <= least + hope]
        if near:
            return min(near, key=loads.__getitem__)
    try:
        return loads.index(least, turn % len(loads))
    except ValueError:
        return loads.index(least)


class PrefixAffinity:
    """Remembers which workers computed which prefix, for the `size` most recent prefixes."""

    def __init__(self, size: int = MAX_PREFIXES) -> None:
        self._size = size
        self._workers: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def workers_with(self, prefix: int) -> Collection[str]:
        """Returns the names of the workers that a prefix was sent to."""
        return self._workers.get(prefix, ())

    def remember(self, hashes: Iterable[int], worker: str) -> None:
        for prefix in hashes:
            self._workers.setdefault(prefix, set()).add(worker)
            self._workers.move_to_end(prefix)
        while len(self._workers) > self._size:
            self._workers.popitem(last=False)

    def evicted(self, prefixes: Iterable[int], worker: str) -> None:
        """Records that the worker no longer has these prefixes."""
        for prefix in prefixes:
            if prefix in self._workers:
                self._workers[prefix].discard(worker)

    def forget(self, worker: str) -> None:
        """Forgets the worker's prefixes, as its cache is gone."""
        for workers in self._workers.values():
            workers.discard(worker)


def seed_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def homes(key: bytes, seeds: Sequence[int], most: int = HOMES) -> list[int]:
    """Returns the positions of the `most` workers with the highest random weights for a key (rendezvous hashing).

    Every frontend finds the same workers. When a worker comes, only the keys that it gains get other homes; when it
    goes, only the keys that it had.

    key: 8 bytes
    seeds: `seed_of` the name of each worker
    """
    number = int.from_bytes(key, "big")
    weights = [(seed ^ number) * _MIX & _MASK for seed in seeds]
    return nlargest(most, range(len(weights)), key=weights.__getitem__)


class Router:
    """Chooses the worker of each request.

    Prefers workers that have a prefix of the prompt (they report it, or this frontend sent it to them), then the homes
    of the prompt's first tokens (all frontends agree on these homes), then the least loaded worker.
    """

    def __init__(self, most_homes: int = HOMES) -> None:
        """most_homes: homes of a prompt; 0: frontends do not agree on any placement (only bench/simulate sets 0)"""
        self._most_homes = most_homes
        self._reported = ReportedPrefixes()
        self._affinity, self._turn = PrefixAffinity(), 0
        self._homes: OrderedDict[bytes, list[int]] = OrderedDict()  # key → its homes, for the latest keys
        self._names: list[str] = []  # the workers, in the order that the positions in `_homes` refer to
        self._position: dict[str, int] = {}
        self._seeds: list[int] = []

    def choose(self, prompt: bytes, identity: str, names: list[str], loads: Sequence[int]) -> tuple[int, int]:
        """Returns the position of the worker to take, and how many tokens of the prompt it is expected to have cached.

        identity: the text of a PrefixIdentity
        names, loads: the ready workers, and the load of each
        """
        if names != self._names:
            self._know(names)
        keys = prefix_keys(prompt, identity)[::-1]
        known, lengths = self._known(keys)
        home = self._home(prompt, identity) if keys and self._most_homes else ()
        chosen = choose(loads, known, self._turn, lengths, home, len(prompt) // 4)
        self._turn = chosen + 1
        saved = next((length for who, length in zip(known, lengths, strict=True) if chosen in who), 0)
        self._affinity.remember(keys, names[chosen])
        return chosen, saved

    def cached(self, prompt: bytes, identity: str, names: list[str]) -> int:
        """Returns how many tokens of a prompt one of these workers is expected to have cached, and chooses none."""
        if names != self._names:
            self._know(names)
        return next(iter(self._known(prefix_keys(prompt, identity)[::-1])[1]), 0)

    def learn(self, worker: str, report: CachedPrefixes) -> None:
        """Applies a worker's report of its prefix cache; raises ValueError if the report is broken."""
        self._affinity.evicted(self._reported.take(worker, report), worker)

    def _know(self, names: Sequence[str]) -> None:
        """Records the names of the present workers, in this order."""
        self._names, self._position = [*names], {name: at for at, name in enumerate(names)}
        self._seeds = [seed_of(name) for name in names]
        self._homes.clear()

    def _known(self, keys: Sequence[int]) -> tuple[list[Collection[int]], list[int]]:
        """Returns, for each prefix of the prompt that a worker has, the positions of its workers and its length in
        tokens, as two lists. keys: the keys of the prompt's prefixes, from the longest to the shortest"""
        position, known, lengths = self._position, list[Collection[int]](), list[int]()
        for length, key in zip(reversed(PREFIX_LENGTHS[: len(keys)]), keys, strict=True):
            names = {*self._affinity.workers_with(key), *self._reported.holders(key)}
            who = sorted([position[name] for name in names if name in position])
            if who:
                known.append(who)
                lengths.append(length)
        return known, lengths

    def _home(self, prompt: bytes, identity: str) -> list[int]:
        key = blake2b(prompt[: 4 * KEY_TOKENS], key=_key(identity), digest_size=8).digest()
        found = self._homes[key] = self._homes.pop(key, []) or homes(key, self._seeds, self._most_homes)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return found

    def forget(self, worker: str) -> None:
        """Forgets the worker's prefixes, as its cache is gone."""
        self._affinity.forget(worker)
        self._reported.forget(worker)


def _key(identity: str) -> bytes:
    """Returns a key of at most 64 bytes for blake2b."""
    return blake2b(identity.encode(), digest_size=16).digest()


# Tracks which prefixes the workers have in their prefix caches, or will have soon, from the workers' Statuses.
#
# A Status lists the keys that came and went since the last Status, and has a checksum of all keys of the worker. By
# the checksum, a frontend notices that it has missed a Status. Each Status also lists a part of all keys; the
# frontend then collects these parts until it knows all keys again.


@dataclass(slots=True)
class _Known:
    """The prefixes of one worker.

    collected: the keys of the parts received so far; None while no parts are collected
    expected: the position at which the next part must begin
    """

    keys: set[int] = field(default_factory=set)
    check: int = 0  # XOR of all keys
    collected: set[int] | None = None
    expected: int = 0


class ReportedPrefixes:
    """Finds the workers that have a prefix, by its key (shared/prefix_identity.py)."""

    def __init__(self) -> None:
        self._workers: dict[str, _Known] = {}
        self._holders: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, key: int) -> tuple[str, ...]:
        """Returns the names of the workers that have this prefix."""
        return self._holders.get(key, ())

    def take(self, worker: str, report: CachedPrefixes) -> "array[int]":
        """Applies the report in a worker's Status, and returns the keys that the worker no longer has.

        Raises ValueError if a column of the report is broken.
        """
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Known()
        came, went = unpack_u32(report.came), unpack_u32(report.went)
        self._apply(worker, known, report, came, went)
        return went

    def _apply(
        self, worker: str, known: _Known, report: CachedPrefixes, came: "array[int]", went: "array[int]"
    ) -> None:
        self._add(worker, known, came)
        self._remove(worker, known, went)
        if known.check == report.check:
            known.collected = None
            return
        if report.first == 0:
            known.collected, known.expected = set(), 0
        if known.collected is None or report.first != known.expected:
            known.collected = None
            return
        known.expected = report.end
        known.collected.update(came)
        known.collected.difference_update(went)
        known.collected.update(unpack_u32(report.part))
        if report.end >= report.total:
            collected, known.collected = known.collected, None
            self._remove(worker, known, known.keys - collected)
            self._add(worker, known, collected)

    def forget(self, worker: str) -> None:
        """Forgets all keys of a worker, whose cache is gone."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._remove(worker, known, [*known.keys])

    def _add(self, worker: str, known: _Known, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in known.keys:
                known.keys.add(key)
                known.check ^= key
                self._holders[key] = (*self._holders.get(key, ()), worker)

    def _remove(self, worker: str, known: _Known, keys: Iterable[int]) -> None:
        for key in keys:
            if key in known.keys:
                known.keys.remove(key)
                known.check ^= key
                left = tuple(name for name in self._holders[key] if name != worker)
                if left:
                    self._holders[key] = left
                else:
                    del self._holders[key]

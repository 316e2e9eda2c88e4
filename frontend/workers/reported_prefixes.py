"""Tracks which prefixes the workers have in their prefix caches, or will have soon, from the workers' Statuses.

A Status lists the keys that came and went since the last Status, and has a checksum of all keys of the worker. By the
checksum, a frontend notices that it has missed a Status. Each Status also lists a part of all keys; the frontend then
collects these parts until it knows all keys again.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages import CachedPrefixes
from shared.wire.codec import unpack_u32


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

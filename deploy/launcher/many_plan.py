"""Decides which model is loaded next, and which models are unloaded for it. Handles no processes or sockets.

    unloaded ──► loading ──► loaded ──► unloading ──► unloaded
                    └──► failed ◄──┘       └──► loaded, if a request needs it after all

The account counts the memory of a model from the moment it begins to load until its process has ended, so that no
memory is promised twice. Models are loaded in the order of their first requests. While the first model in the queue
waits for memory, the others wait, too; otherwise small models could keep a large one out for ever.

Requests that follow each other closely could keep a model loaded for ever. So a model that others wait for has a turn,
at least TURN_S and as long as its loading took. Then it takes no more requests, and is unloaded when those that it has
are done. If they are not done after MOST_DRAIN_S, it goes on, and its next turn is longer.

The table may be replaced at any time. A loaded model keeps its old entry until it is unloaded. It is unloaded when no
request needs it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deploy.supervisor.models.sizes import GIB
from shared.models.entries import Entry
from shared.models.messages import State

TURN_S = 10.0
MOST_DRAIN_S = 30.0
RETRY_S = 10.0  # after a failure, requests cause no attempt to load for this time


@dataclass(slots=True, eq=False)
class Slot:
    """A model of the table. Times are those of a monotonic clock, in seconds.

    keep_alive: how long the model stays loaded without requests; infinity: until its memory is needed
    nbytes: the model's memory in the account
    announced: the first version of the table that tells frontends about the unloading; 0: none does yet
    leaving: whether the newest table lacks this entry
    began: when its loading began
    turn_ends: when it must make room for models that wait, even if requests use it
    drains_since: since when it makes room although requests use it; None: it does not
    """

    entry: Entry
    keep_alive: float
    nbytes: int = 0
    state: State = "unloaded"
    reason: str = ""
    attempts: int = 0
    used_at: float = 0.0
    failed_at: float = -math.inf
    announced: int = 0
    used: bool = False  # whether a request uses the model now
    leaving: bool = False
    began: float = -math.inf
    turn_ends: float = -math.inf
    drains_since: float | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def counts(self) -> bool:
        """Whether the account counts memory for the model."""
        return self.state in ("loading", "loaded", "unloading")


@dataclass(slots=True)
class Account:
    """The models of the table, and the limits on the number and the memory of loaded models."""

    slots: dict[str, Slot] = field(init=False, default_factory=dict)
    entries: Sequence[Entry]  # the newest table
    keep_alive: float
    most_models: int
    most_bytes: int
    clock: Callable[[], float]
    size_of: Callable[[Entry], int]  # raises OSError or ValueError for a checkpoint that cannot be read
    asleep: bool = False  # whether all models are unloaded and none may be loaded
    _order: list[Slot] = field(default_factory=list)
    _front: Slot | None = None  # the first of the queue
    _waits_since: float = 0.0  # since when it is the first

    def __post_init__(self) -> None:
        self.renew()

    def keep_alive_of(self, entry: Entry) -> float:
        return math.inf if entry.pinned else self.keep_alive

    def replace(self, entries: Sequence[Entry]) -> None:
        """Records a new table. `renew` then applies it to all models, except those loaded under an old entry."""
        self.entries, newest = entries, {entry.name: entry for entry in entries}
        for slot in self.slots.values():
            slot.leaving = newest.get(slot.name) != slot.entry

    def renew(self) -> None:
        """Updates the slots to the newest table. Slots with an older entry stay as long as they take memory."""
        kept = {slot.name: slot for slot in self.slots.values() if slot.counts or not slot.leaving}
        self._order = [slot for slot in self._order if kept.get(slot.name) is slot]
        in_table = {entry.name: kept.get(entry.name) or self._new(entry) for entry in self.entries}
        self.slots = in_table | kept

    def _new(self, entry: Entry) -> Slot:
        """Returns a slot that continues the count of attempts, so that waiting requests recognize a new failure."""
        before = self.slots.get(entry.name)
        return Slot(entry, self.keep_alive_of(entry), attempts=before.attempts if before else 0)

    @property
    def loading(self) -> bool:
        return any(slot.state == "loading" for slot in self.slots.values())

    @property
    def nbytes(self) -> int:
        """The memory of all models that are loaded, loading or unloading."""
        return sum(slot.nbytes for slot in self.slots.values() if slot.counts)

    def ask(self, slot: Slot, *, explicitly: bool = False) -> None:
        """Queues the model for loading. After a failure, this has no effect until RETRY_S have passed.

        explicitly: whether a person asked for the model, and not a request; RETRY_S then does not apply
        """
        if not (explicitly or self.may_be_tried(slot)):
            return
        if slot in self._order or slot.state in ("loading", "loaded"):
            return
        self._order.append(slot)
        if not slot.counts:
            try:
                slot.nbytes = self.size_of(slot.entry)
            except (OSError, ValueError) as error:
                slot.attempts += 1
                self.failed(slot, str(error))

    def may_be_tried(self, slot: Slot) -> bool:
        """Whether a request may cause an attempt to load the model now."""
        return slot.state != "failed" or self.clock() >= slot.failed_at + RETRY_S

    def use(self, used: Iterable[str], wanted: Iterable[str]) -> None:
        """Records which models the requests of all frontends use now (`used`) and wait for (`wanted`)."""
        now, used, wanted = self.clock(), set(used), list(wanted)
        used |= {name for name in wanted if name in self.slots and self.slots[name].state == "loaded"}
        for slot in self.slots.values():
            if slot.used or slot.name in used:
                slot.used_at = now
            slot.used = slot.name in used
        for name in wanted:
            if name in self.slots:
                self.ask(self.slots[name])

    def forget_unwanted(self, wanted: Iterable[str]) -> None:
        """Removes from the queue the models for which no request waits any more."""
        kept = set(wanted)
        for slot in [slot for slot in self._order if slot.name not in kept]:
            self._answered(slot)

    def next_to_load(self) -> Slot | None:
        """Returns the model to load now, which then counts as loading; None if no model waits or memory is lacking."""
        while self._order and not self.asleep:
            slot = self._order[0]
            if slot.state in ("loading", "loaded") or slot.leaving:
                self._answered(slot)
            elif problem := self.never_fits(slot):
                slot.attempts += 1
                self.failed(slot, problem)
            elif slot.state == "unloading" or not self._fits(slot):
                return None
            else:
                self._answered(slot)
                slot.state, slot.reason, slot.attempts = "loading", "", slot.attempts + 1
                slot.began, slot.drains_since = self.clock(), None
                return slot
        return None

    def next_to_unload(self) -> Slot | None:
        """Returns a loaded model to unload now, which then counts as unloading, or None. The model was idle
        for too long, is not in the table any more, or its memory is needed."""
        now = self.clock()
        idle = [slot for slot in self.slots.values() if slot.state == "loaded" and not slot.used]
        found = next(
            (slot for slot in idle if slot.leaving or self.asleep or now >= slot.used_at + slot.keep_alive), None
        )
        waiting = self._order[0] if self._order else None
        if waiting is not self._front:
            self._front, self._waits_since = waiting, now
        if found is None and waiting is not None and not self._fits(waiting, after_unloading=True):
            found = min((slot for slot in idle if not slot.entry.pinned), key=lambda slot: slot.used_at, default=None)
            if found is None and (found := self._after_its_turn(now)) is not None:
                found.drains_since = now
        if found is not None:
            found.state = "unloading"
        return found

    def _after_its_turn(self, now: float) -> Slot | None:
        """Returns the model in use whose turn ended first, if one ended while another model waited; else None."""
        if now < self._waits_since + TURN_S:
            return None
        in_use = (
            slot for slot in self.slots.values() if slot.state == "loaded" and slot.used and not slot.entry.pinned
        )
        ended = (slot for slot in in_use if now >= slot.turn_ends)
        return min(ended, key=lambda slot: slot.turn_ends, default=None)

    def goes_on(self, slot: Slot) -> bool:
        """Says whether a model that is unloading, but that requests use, counts as loaded again."""
        now = self.clock()
        if slot.drains_since is not None:
            if self._order and self._order[0] is not slot and now < slot.drains_since + MOST_DRAIN_S:
                return False
            slot.drains_since, slot.turn_ends = None, now + 2 * MOST_DRAIN_S
        slot.state, slot.announced = "loaded", 0
        return True

    def loaded(self, slot: Slot) -> None:
        now = slot.used_at = self.clock()
        slot.state, slot.turn_ends = "loaded", now + max(TURN_S, now - slot.began)

    def failed(self, slot: Slot, reason: str) -> None:
        slot.state, slot.reason, slot.failed_at = "failed", reason, self.clock()
        self._answered(slot)

    def never_fits(self, slot: Slot) -> str:
        """Returns why the model would not fit even if all unpinned models were unloaded; empty if it would fit."""
        pinned = [other for other in self.slots.values() if other.entry.pinned and other.counts and other is not slot]
        held = sum(other.nbytes for other in pinned)
        if slot.nbytes + held > self.most_bytes:
            beside = f", of which pinned models take {held / GIB:.2f} GiB" if held else ""
            return (
                f"it needs {slot.nbytes / GIB:.2f} GiB, and all models together may take "
                f"{self.most_bytes / GIB:.2f} GiB{beside} (--memory-gb)"
            )
        if len(pinned) >= self.most_models:
            return f"{len(pinned)} pinned models are loaded, and not more may be (--max-loaded-models)"
        return ""

    def _fits(self, slot: Slot, *, after_unloading: bool = False) -> bool:
        others = [other for other in self.slots.values() if other.counts and other is not slot]
        if after_unloading:
            others = [other for other in others if other.state != "unloading"]
        enough = slot.nbytes + sum(other.nbytes for other in others) <= self.most_bytes
        return enough and len(others) < self.most_models

    def _answered(self, slot: Slot) -> None:
        if slot in self._order:
            self._order.remove(slot)

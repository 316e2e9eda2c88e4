"""The LoRA adapter of a sequence, and whether it may run together with the adapters of other sequences."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.messages import Adapter

if TYPE_CHECKING:
    from worker.schedule.sequence import Plan, Sequence


@dataclass(slots=True)
class AdapterUse:
    """The adapter that a request names. loaded: its weights (worker/adapters/loaded.py); None before they are read."""

    adapter: Adapter
    loaded: Any = None

    def has_place(self, running: "Iterable[Sequence]", most: int) -> bool:
        """Returns whether the running sequences and this one together use at most `most` different adapters."""
        return len(used_by(running) | {self.adapter.unscaled}) <= most


def has_adapters(plan: "Plan") -> bool:
    return any([chunk.sequence.adapter is not None for chunk in plan.chunks])


def used_by(sequences: "Iterable[Sequence]") -> set[Adapter]:
    """Returns the adapters that the sequences use. Adapters that differ only in their scale count as one."""
    return {one.adapter.adapter.unscaled for one in sequences if one.adapter is not None}

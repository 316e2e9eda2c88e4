"""The LoRA adapter of a sequence, and whether it may run beside those of others. Knows no weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.messages import Adapter

if TYPE_CHECKING:
    from worker.schedule.sequence import Sequence


@dataclass(slots=True)
class AdapterUse:
    """loaded: the adapter in memory (worker/adapters/loaded.py); None before it is read"""

    adapter: Adapter
    loaded: Any = None

    def has_place(self, running: "Iterable[Sequence]", most: int) -> bool:
        """Returns whether running sequences that use at most `most` different adapters may use this one, too."""
        return len(used_by(running) | {self.adapter.unscaled}) <= most


def used_by(sequences: "Iterable[Sequence]") -> set[Adapter]:
    """Returns, without their scales, the adapters that sequences use."""
    return {one.adapter.adapter.unscaled for one in sequences if one.adapter is not None}

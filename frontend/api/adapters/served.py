"""Adapters as entries of the table of models: each is its base model under another name, with an adapter."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from frontend.api.adapters.registry import AdapterRegistry
from frontend.api.model_table import ServedModel
from shared.messages import Adapter


@dataclass
class ServedAdapters:
    """The adapters of one base model."""

    base: ServedModel
    registry: AdapterRegistry
    _made: dict[Adapter, ServedModel] = field(default_factory=dict)

    def get(self, name: str) -> ServedModel | None:
        """Returns the entry of an adapter; None if there is none of this name."""
        adapter = self.registry.adapters.get(name)
        return None if adapter is None else self._entry(adapter)

    def __iter__(self) -> Iterator[ServedModel]:
        known = [*self.registry.adapters.values()]
        self._made = {adapter: made for adapter, made in self._made.items() if adapter in known}
        return iter([self._entry(adapter) for adapter in known])

    def _entry(self, adapter: Adapter) -> ServedModel:
        if adapter not in self._made:
            self._made[adapter] = replace(self.base, names=(adapter.name,), adapter=adapter)
        return self._made[adapter]

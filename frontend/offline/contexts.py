"""Chooses the ModelContext for reading a Python caller's request: of the model, or of the model with an adapter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from frontend.api.model_context import ModelContext
from frontend.errors import Unprocessable
from shared.config import ModelConfig, WorkerConfig
from shared.messages import Adapter

ContextOf = Callable[[str | None], ModelContext]  # the argument: an adapter's name; None: no adapter


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of an `LLM`. base: for the model without an adapter; adapters: the setting lora_modules, by name"""

    base: ModelContext
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def of(self, adapter: str | None) -> ModelContext:
        """Returns the context of the model with this adapter. Raises Unprocessable for an unknown name."""
        if adapter is None:
            return self.base
        found = self.adapters.get(adapter)
        if found is None:
            known = ", ".join(map(repr, self.adapters)) or "none: name them with lora_modules"
            raise Unprocessable(
                f"`adapter`: there is no adapter {adapter!r}; there are {known}",
                param="adapter",
                code="model_not_found",
            )
        return replace(self.base, model=adapter, names=frozenset((adapter,)), adapter=found)

    def of_model(self, name: str) -> ModelContext:
        """Returns the context of an answer whose `model` is `name`: an adapter's, or else the base model's."""
        return self.of(name if name in self.adapters else None)


def adapters_of(model: ModelConfig, worker: WorkerConfig) -> Mapping[str, Adapter]:
    """Reads the files of the adapters that the settings name. Raises ConfigError."""
    if not model.lora_modules:
        return {}
    from frontend.api.adapters.registry import AdapterRegistry

    return AdapterRegistry(model, max_rank=worker.max_lora_rank).adapters

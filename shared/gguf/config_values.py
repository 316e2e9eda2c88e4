"""Reads the values under the name of an architecture in the metadata of a GGUF file.

A value that no code reads might change what the model computes, so a file with such a value is refused.
"""

from dataclasses import dataclass, field
from typing import Any

from shared.gguf.container import Container
from shared.gguf.errors import GgufError

Config = dict[str, Any]

HARMLESS = (
    "vocab_size",
    "pooling_type",
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "tensor_data_layout",
)
OF_VISION = ("vision.", "mm.")  # prefixes of values of vision parts, which the text model does not need


@dataclass
class Hyperparameters:
    """The values under the name of the architecture, and which of them have been read."""

    container: Container
    architecture: str
    seen: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        self.seen.add(name)
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.container.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.container.number(self.key(name), default)

    def text(self, name: str, default: str | None = None) -> str:
        return self.container.text(self.key(name), default)

    def entries(self, name: str, kind: Any, default: list[Any] | None = None) -> list[Any]:
        return self.container.entries(self.key(name), kind, default)

    def expect(self, name: str, value: float | bool) -> None:
        """Raises GgufError if the file states another value than `value`, the only supported one."""
        found = self.container.metadata.get(self.key(name), value)
        if found != value:
            raise GgufError(f"{self.container.name}: {self.key(name)} is {found}; supported is {value}")

    def check_all_seen(self) -> None:
        prefix = f"{self.architecture}."
        for key, value in self.container.metadata.items():
            name = key.removeprefix(prefix)
            known = name in self.seen or name in HARMLESS or name.startswith(OF_VISION)
            if key.startswith(prefix) and value and not known:
                raise GgufError(f"{self.container.name}: {key} is {str(value)[:40]}; this value is not supported")

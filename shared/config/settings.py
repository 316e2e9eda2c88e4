"""All settings of one command, by record and by name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig
from shared.config.launch import LaunchConfig
from shared.config.model import ModelConfig
from shared.config.models import ModelsConfig
from shared.config.wire import WireConfig
from shared.config.worker import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All records of one command; a command uses the ones it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def many(self) -> bool:
        """Whether the server has a table of models, each loaded when a request asks for it, instead of one model."""
        return self.models.has_table or bool(self.model.several)


# Code refers to a setting by its field name alone, so no two records may have a field of the same name.


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Returns the settings with some of them changed.

    values: new values by field name, such as `page_size`. `settings_check.check` checks them; this function does not.
    Raises ConfigError for an unknown name.
    """
    if unknown := values.keys() - _flat(settings).keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    changed = {}
    for record in dataclasses.fields(Settings):
        current = getattr(settings, record.name)
        new = {item.name: values[item.name] for item in dataclasses.fields(current) if item.name in values}
        changed[record.name] = dataclasses.replace(current, **new)
    return Settings(**changed)


def non_default_names(settings: Settings) -> frozenset[str]:
    """Returns the names of the settings whose value is not the default."""
    values, defaults = _flat(settings), _flat(Settings())
    return frozenset(name for name in values if values[name] != defaults[name])


def _flat(settings: Settings) -> dict[str, Any]:
    return {
        item.name: getattr(getattr(settings, record.name), item.name)
        for record in dataclasses.fields(settings)
        for item in dataclasses.fields(getattr(settings, record.name))
    }

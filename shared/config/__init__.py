"""Every setting with its meaning, unit and default: frozen records, read once from flags and environment.

declaration.py             how a setting is declared, and what is wrong with a value
settings.py                the records that several kinds of process share, the launcher's, and all records together
worker.py, frontend.py     the records of one kind of process
flags.py                   reads flags and environment variables
check.py                   the rules between settings

A field `prefill_chunk_size` is the flag `--prefill-chunk-size` and the variable `SLUICE_PREFILL_CHUNK_SIZE`
(flags win); booleans get `--x / --no-x`. `at_least`, `above` and `at_most` bound one setting.
"""

from shared.config.declaration import BY_DEVICE, ConfigError, flag_name, setting, value_problem, words
from shared.config.frontend import FrontendConfig
from shared.config.settings import (
    LaunchConfig,
    ModelConfig,
    ModelsConfig,
    Settings,
    WireConfig,
    non_default_names,
    with_values,
)
from shared.config.worker import WorkerConfig

__all__ = [
    "BY_DEVICE",
    "ConfigError",
    "FrontendConfig",
    "LaunchConfig",
    "ModelConfig",
    "ModelsConfig",
    "Settings",
    "WireConfig",
    "WorkerConfig",
    "flag_name",
    "non_default_names",
    "setting",
    "value_problem",
    "with_values",
    "words",
]

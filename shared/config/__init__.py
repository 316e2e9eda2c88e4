"""Every setting with its meaning, unit and default: frozen records, read once from flags and environment.

declaration         how a setting is declared, and what is wrong with a value
model, wire         records that frontends and workers share
speculation         what --speculative-config may state
models              the record of a server with many models
worker, frontend, launch    the records of one kind of process
settings            all records together

A field `prefill_chunk_size` is the flag `--prefill-chunk-size` and the variable `SLUICE_PREFILL_CHUNK_SIZE`
(flags win); booleans get `--x / --no-x`. `at_least`, `above` and `at_most` bound one setting; check.py holds
the rules between settings; flags.py reads flags and variables.
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

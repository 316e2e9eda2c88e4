"""The settings of the launcher."""

from dataclasses import dataclass

from shared.config.declaration import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The launcher: its processes and its timeouts."""

    frontends: int = setting(1, "frontend processes that share the port", unit="processes", at_least=1)
    workers: int = setting(
        1, "worker processes, each with the whole model: one per GPU; on the CPU they divide --threads; "
        "0: only the workers of --worker-addresses or --workers-file", unit="processes", at_least=0,
    )  # fmt: skip
    stop_timeout: float = setting(40.0, "time after SIGTERM before child processes are killed", unit="seconds", above=0)
    load_timeout: float = setting(
        600.0, "a loading process that makes no progress and prints nothing for this long is restarted",
        unit="seconds", above=0,
    )  # fmt: skip

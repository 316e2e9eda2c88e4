"""Limits on connections, from the settings and from the system's limit on open files."""

import contextlib
import logging
import resource
from dataclasses import dataclass

from shared.config import ConfigError, FrontendConfig

log = logging.getLogger("sluice.frontend")

OTHER_FILES = 64  # open files that a frontend needs in addition to its connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits. FrontendConfig describes the settings of the same names. Sizes are in bytes, times in seconds."""

    connections: int = 10_000
    header_bytes: int = 64 << 10
    request_s: float = 60.0
    write_s: float = 60.0
    idle_s: float = 75.0

    @classmethod
    def of(cls, config: FrontendConfig) -> "ConnectionLimits":
        """Makes the limits from the settings. Allows fewer connections if the system's limit on open files is lower."""
        connections = available_connections(config.max_connections)
        if connections < config.max_connections:
            log.warning(
                "--max-connections %d needs more open files than the system allows (ulimit -n); using %d",
                config.max_connections, connections,
            )  # fmt: skip
        return cls(
            connections, config.max_header_bytes, config.request_timeout, config.write_timeout, config.idle_timeout
        )


def available_connections(connections: int) -> int:
    """Raises the limit on open files as far as allowed, and returns how many of `connections` it then permits.

    Raises ConfigError if it permits no connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit - OTHER_FILES >= connections:
        return connections
    if limit <= OTHER_FILES:
        raise ConfigError(f"--max-connections {connections}: the system allows only {limit} open files (ulimit -n)")
    return limit - OTHER_FILES

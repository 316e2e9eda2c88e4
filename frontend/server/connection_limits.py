"""How much of a connection is borne: the settings, and how many open files the system allows."""

import contextlib
import logging
import resource
from dataclasses import dataclass

from shared.config import ConfigError, FrontendConfig

log = logging.getLogger("sluice.frontend")

OTHER_FILES = 64  # what a frontend has open besides its connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """See the settings of these names in FrontendConfig; sizes in bytes, times in seconds."""

    connections: int = 10_000
    header_bytes: int = 64 << 10
    request_s: float = 60.0
    write_s: float = 60.0
    idle_s: float = 75.0

    @classmethod
    def of(cls, config: FrontendConfig) -> "ConnectionLimits":
        """Those of the settings, with fewer connections if the system does not allow so many open files."""
        connections = room_for(config.max_connections)
        if connections < config.max_connections:
            log.warning(
                "--max-connections %d needs more open files than the system allows (ulimit -n): it is %d",
                config.max_connections, connections,
            )  # fmt: skip
        return cls(
            connections, config.max_header_bytes, config.request_timeout, config.write_timeout, config.idle_timeout
        )


def room_for(connections: int) -> int:
    """How many of so many connections the system lets this process have; asks it for all it may give.

    Raises ConfigError when there is no room to speak of.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or most - OTHER_FILES >= connections:
        return connections
    if most <= OTHER_FILES:
        raise ConfigError(f"--max-connections {connections}: the system allows only {most} open files (ulimit -n)")
    return most - OTHER_FILES

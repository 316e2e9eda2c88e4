"""Tests of frontend/server/http_protocol.py."""

import resource

from frontend.server.http_protocol import ConnectionLimits, available_connections
from shared.config.frontend import FrontendConfig


def test_open_files_are_raised_to_the_limit_of_the_system() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 128), before[1]))
        assert available_connections(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        assert available_connections(1 << 40) < 1 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_limits_take_the_sizes_and_times_of_the_settings() -> None:
    config = FrontendConfig(
        max_connections=7, max_header_bytes=2048, request_timeout=1, write_timeout=2, idle_timeout=3
    )
    assert ConnectionLimits.of(config) == ConnectionLimits(7, 2048, 1, 2, 3)

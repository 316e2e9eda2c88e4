"""shared/wire.py, and the settings that name workers."""

import pytest

from shared.address import LONGEST_SOCKET_PATH, parse
from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values


@pytest.mark.parametrize(
    ("text", "requests", "events"),
    [
        ("tcp://gpu:5700", "tcp://gpu:5700", "tcp://gpu:5701"),
        ("tcp://[::1]:5", "tcp://[::1]:5", "tcp://[::1]:6"),
        ("ipc:///run/a/", "ipc:///run/a/requests.sock", "ipc:///run/a/events.sock"),
    ],
)
def test_parse_names_both_sockets(text: str, requests: str, events: str) -> None:
    assert (parse(text).requests, parse(text).events) == (requests, events)


@pytest.mark.parametrize("text", ["gpu:5700", "tcp://gpu", "tcp://gpu:65535", "tcp://:1", "ipc://a", "http://a:1"])
def test_invalid_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--worker-addresses.*tcp://HOST:PORT or ipc:///FOLDER, not"):
        check(with_values(Settings(), {"worker_addresses": text, "insecure": True}))


def test_path_that_is_too_long_for_a_socket_is_named() -> None:
    """A frontend would wait for such a worker for ever."""
    longest = "ipc:///" + "x" * (LONGEST_SOCKET_PATH - len("//requests.sock"))
    assert len(parse(longest).requests.removeprefix("ipc://")) == LONGEST_SOCKET_PATH
    with pytest.raises(ConfigError, match=r"^--worker-addresses: /x+/requests.sock has 108 bytes, .* at most 107$"):
        check(with_values(Settings(), {"worker_addresses": f"{longest}x"}))
    with pytest.raises(ConfigError, match=r"^--request-address and --event-address: /x+/y+ has 113 bytes"):
        check(with_values(Settings(), {"request_address": f"{longest}/{'y' * 19}", "event_address": "ipc:///e"}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": 0}, "--workers 0 needs"),
        ({"worker_addresses": "tcp://a:1"}, "--curve-dir"),
        (
            {"workers": 2, "request_address": "ipc:///a", "event_address": "ipc:///b"},
            "cannot be combined with --workers",
        ),
        ({"workers_file": "f", "request_address": "ipc:///a"}, "cannot be combined with --workers-file"),
    ],
)
def test_contradictory_worker_settings_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(with_values(Settings(), values))

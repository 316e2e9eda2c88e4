"""The wire addresses that settings mean."""

from shared.config.settings import WireConfig


def test_addresses_default_to_the_run_dir() -> None:
    wire = WireConfig(run_dir="/run/s")
    assert (wire.requests, wire.events) == ("ipc:///run/s/requests.sock", "ipc:///run/s/events.sock")
    assert WireConfig(run_dir="/run/s", request_address="tcp://h:1").requests == "tcp://h:1"

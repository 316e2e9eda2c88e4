"""The records of settings."""

import dataclasses
from typing import Any

import pytest

from shared.config import (
    ConfigError,
    ModelConfig,
    Settings,
    WireConfig,
    non_default_names,
    setting,
    value_problem,
    with_values,
)
from tests.shared.harness import FLAGS


def test_setting_names_are_unique() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)


def test_every_setting_has_help() -> None:
    for flag in FLAGS:
        assert dataclasses.is_dataclass(getattr(Settings(), flag.record))
        assert len(flag.field.metadata["help"]) > 10


def test_with_values_changes_fields_of_any_record_and_nothing_else() -> None:
    settings = with_values(Settings(), {"port": 9, "page_size": 64})
    assert (settings.frontend.port, settings.worker.page_size) == (9, 64)
    assert non_default_names(settings) == {"port", "page_size"}
    assert non_default_names(Settings()) == frozenset()


def test_with_values_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match="there is no setting colour, size"):
        with_values(Settings(), {"size": 1, "colour": 2, "port": 3})


@pytest.mark.parametrize(
    ("bounds", "value", "problem"),
    [
        ({"at_least": 1}, 1, ""),
        ({"at_least": 1}, 0, "must be at least 1"),
        ({"above": 0}, 0.0, "must be above 0"),
        ({"at_most": 1}, 1.5, "must be at most 1"),
        ({"choices": ("a", "b")}, "c", "must be one of a, b"),
        ({}, float("nan"), "must be a finite number"),
        ({}, float("inf"), "must be a finite number"),
    ],
)
def test_value_problem_names_the_violated_bound(bounds: dict[str, Any], value: Any, problem: str) -> None:
    assert value_problem(setting(0, "help", **bounds), value) == problem


def test_addresses_default_to_the_run_dir() -> None:
    wire = WireConfig(run_dir="/run/s")
    assert (wire.requests, wire.events) == ("ipc:///run/s/requests.sock", "ipc:///run/s/events.sock")
    assert WireConfig(run_dir="/run/s", request_address="tcp://h:1").requests == "tcp://h:1"


def test_served_name_defaults_to_the_model() -> None:
    assert ModelConfig(model="org/m").name == "org/m"
    assert ModelConfig(model="org/m", served_model_name="m").name == "m"

"""All settings together."""

import dataclasses

import pytest

from shared.config.declaration import ConfigError
from shared.config.settings import Settings, non_default_names, with_values
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

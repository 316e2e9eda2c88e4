"""The records of settings."""

import dataclasses

from shared.config import Settings
from tests.shared.harness import FLAGS


def test_setting_names_are_unique() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)


def test_every_setting_has_help() -> None:
    for flag in FLAGS:
        assert dataclasses.is_dataclass(getattr(Settings(), flag.record))
        assert len(flag.field.metadata["help"]) > 10

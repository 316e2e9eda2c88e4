"""Parses `sluice serve` command lines."""

import pytest

from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, all_flags, read
from shared.config.settings import Settings

FLAGS = all_flags()


def parse(*argv: str, **environment: str) -> Settings:
    parser = Parser(prog="sluice serve")
    add_flags(parser, FLAGS)
    return read(parser.read(argv), environment, FLAGS)


def refuse(*argv: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)

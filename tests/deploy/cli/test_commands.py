"""The table of `sluice` commands: every row names a function, and every parser describes its command."""

import pytest

from deploy.cli.main import COMMANDS, TOOLS, load_function


@pytest.mark.parametrize("place", [entry.run for entry in (COMMANDS | TOOLS).values()])
def test_every_command_names_a_function(place: str) -> None:
    assert callable(load_function(place))


@pytest.mark.parametrize("name", [name for name, tool in TOOLS.items() if tool.parser])
def test_every_parser_describes_its_command(name: str) -> None:
    parser = load_function(TOOLS[name].parser)()
    assert parser.prog == f"sluice {name}"
    assert parser.description

"""The list of wheels follows pyproject.toml, without the packages that a machine for PyTorch already has."""

from bench.gpu.calls.packages import DISTRIBUTIONS, SERVER
from bench.gpu.offline.wheels import THERE, advice, requirements


def test_wheels_are_those_that_the_parts_need_and_that_are_missing() -> None:
    names = {line.split(">")[0].split("=")[0].replace("_", "-") for line in requirements()}
    needed = {DISTRIBUTIONS.get(name, name) for name in SERVER}
    assert needed - THERE <= names and not names & THERE
    assert "pytest-asyncio" in names


def test_wheels_are_fetched_for_the_python_of_the_other_machine() -> None:
    assert "--python-version 3.12" in advice("3.12") and "'msgspec>=" in advice("3.12")

"""docs/architecture.md and docs/models.md name files that exist, and functions that these files have."""

import ast
import re
from collections.abc import Iterable
from functools import cache

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/architecture.md"
PATH = re.compile(r"`((?:frontend|worker|shared|deploy|bench|tests|docs)/[\w./]*)`")
STEP = re.compile(r"^\d\. \*\*.*?(?=^\d\. |^$)", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"`((?:\w+\.)?\w+)\(\)`")
STEPS = STEP.findall(PAGE.read_text())


@cache
def definitions(path: str) -> set[str]:
    """Returns the names of the functions and classes of a module; methods as `Class.method`."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {one.name for one in tree.body if isinstance(one, (*functions, ast.ClassDef))}
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
    return names | {f"{each.name}.{one.name}" for each in classes for one in each.body if isinstance(one, functions)}


def names_in(paths: Iterable[str]) -> set[str]:
    return set().union(*[definitions(path) for path in paths])


@pytest.mark.parametrize("page", ["architecture.md", "models.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    paths = PATH.findall((ROOT / "docs" / page).read_text())
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_life_of_a_request_has_nine_steps() -> None:
    assert len(STEPS) == 9 and all(PATH.search(step) for step in STEPS)


@pytest.mark.parametrize("number", range(1, 10))
def test_step_names_functions_of_the_files_that_the_steps_name(number: int) -> None:
    here = [path for path in PATH.findall("".join(STEPS[:number])) if path.endswith(".py")]
    beside = [path for folder in {path.rpartition("/")[0] for path in here} for path in _beside(folder, number)]
    assert set(FUNCTION.findall(STEPS[number - 1])) <= names_in([*here, *beside])


def _beside(folder: str, number: int) -> list[str]:
    """Returns the files of a folder that a step names without it: `inputs.py` beside another file."""
    bare = re.findall(r"`(\w+\.py)`", STEPS[number - 1])
    return [f"{folder}/{name}" for name in bare if (ROOT / folder / name).is_file()]

"""Imports the parts of this folder that only some checkpoints need, when the first of these is met."""

from importlib import import_module
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel


def room(module: str, what: str) -> Any:
    """Returns a module under worker/model. what: the plural that the message names if the module is missing.

    Raises UnsupportedModel if it is missing: an installation may leave out what its models do not use.
    """
    name = f"{__package__}.{module}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UnsupportedModel(f"{what} are not supported by this installation: it lacks {name}") from error

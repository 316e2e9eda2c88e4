"""Imports modules of this folder that only some checkpoints need, when such a checkpoint is loaded."""

from importlib import import_module
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel


def room(module: str, what: str) -> Any:
    """Imports and returns a module under worker/model. what: what the module supports, a plural for the error message

    Raises UnsupportedModel if the module is missing: an installation may leave out modules that its models do not use.
    """
    name = f"{__package__}.{module}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UnsupportedModel(f"{what} are not supported by this installation: it lacks {name}") from error

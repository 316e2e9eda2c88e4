"""Refuses a feature whose module is missing with a clear error, so that an operator may delete unwanted modules.

A feature's module is imported by the first request that asks for it, so all other requests work without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.errors import NotSupported


@contextmanager
def missing_modules_refused() -> Iterator[None]:
    """Raises NotSupported if a module of the frontend cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("frontend."):
            raise
        raise NotSupported(
            f"this server has no `{error.name}`, which the request needs", code="unsupported_field"
        ) from error

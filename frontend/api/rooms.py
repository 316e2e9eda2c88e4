"""A feature whose module is missing is refused in words: who does not want a feature may delete its module.

A feature's module is imported by the first request that asks for it, so all other requests are served without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.errors import NotSupported


@contextmanager
def missing_modules_refused() -> Iterator[None]:
    """Raises NotSupported where a module of the frontend cannot be found."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("frontend."):
            raise
        raise NotSupported(
            f"this server has no `{error.name}`, which the request needs", code="unsupported_field"
        ) from error

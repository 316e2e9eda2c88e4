"""The keywords of JSON schemas that a request states and a grammar does not enforce, for a header of its response.

In a file of its own, so that the middleware loads no grammars.
"""

from collections.abc import Mapping
from contextvars import ContextVar

# The paths of the keywords that the present request lost, with the reasons; None: nobody asks for them.
dropped: ContextVar[dict[str, str] | None] = ContextVar("dropped", default=None)


def report_dropped(found: Mapping[str, str]) -> None:
    """Notes keywords for the response to the present request."""
    known = dropped.get()
    if known is not None:
        known.update(found)

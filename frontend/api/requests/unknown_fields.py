"""Refuses the fields of a request that its type does not know, or ignores and reports them.

An ignored field is named in the response's header `X-Sluice-Ignored-Fields`, and once in the log.
"""

import logging
import re
from collections.abc import Mapping
from urllib.parse import quote

from frontend.api.requests.decoding import OnUnknown, refuse_unknown

log = logging.getLogger("sluice.frontend")

STRICT_PATHS = frozenset({"/v1/completions"})  # what `auto` refuses on
MAX_HEADER_CHARS = 1024
MAX_LOGGED = 1000  # names; a client may send any number of others
MORE = ", ..."
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """The server's policy, and the names that its log has already."""

    def __init__(self, policy: str) -> None:
        """
        policy: `refuse`, `ignore`, or `auto`: refuse on STRICT_PATHS only
        """
        self._policy = policy
        self._logged: set[str] = set()

    def reader(self, path: str, ignored: dict[str, None]) -> OnUnknown:
        """Returns the function that a request to `path` calls with the name of each unknown field.

        ignored: the names of ignored fields are added to it; `[]` in a name stands for any index of an array
        """
        if self._policy == "refuse" or (self._policy == "auto" and path in STRICT_PATHS):
            return refuse_unknown

        def ignore(field: str) -> None:
            name = quote(_INDEX.sub("[]", field), safe="[]")  # a header has neither commas nor other alphabets
            ignored[name] = None
            self._log(name)

        return ignore

    def _log(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning(
                "requests have the unknown field %.200s, which is ignored; --unknown-fields refuse refuses them", name
            )


def header_value(ignored: Mapping[str, None]) -> str:
    """Returns the names, separated by commas and a space; a value that would be too long ends with `MORE`."""
    value = ", ".join(ignored)
    if len(value) <= MAX_HEADER_CHARS:
        return value
    return value[: MAX_HEADER_CHARS - len(MORE)].rpartition(", ")[0] + MORE

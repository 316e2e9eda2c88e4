"""Refuses the request fields that no type declares, or else ignores and reports them.

An ignored field is named in the response header `X-Sluice-Ignored-Fields`, and once in the log.
"""

import logging
import re
from urllib.parse import quote

from frontend.schema.decoding import OnUnknown, refuse_unknown

log = logging.getLogger("sluice.frontend")

STRICT_PATHS = frozenset({"/v1/completions"})  # the paths for which the policy `auto` refuses
MAX_LOGGED = 1000  # limit on logged field names: a client could otherwise fill the log with made-up names
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """The server's policy for unknown fields, and the field names that it has logged."""

    def __init__(self, policy: str) -> None:
        """
        policy: `refuse`, `ignore`, or `auto`: refuse on STRICT_PATHS only
        """
        self._policy = policy
        self._logged: set[str] = set()

    def reader(self, path: str, ignored: dict[str, None]) -> OnUnknown:
        """Returns the callback for the name of each unknown field in a request to `path`.

        ignored: a dict to which the callback adds the ignored names; `[]` in a name stands for any index of an array
        """
        if self._policy == "refuse" or (self._policy == "auto" and path in STRICT_PATHS):
            return refuse_unknown

        def ignore(field: str) -> None:
            name = quote(_INDEX.sub("[]", field), safe="[]")  # in a header, names must be ASCII without commas
            ignored[name] = None
            self._log(name)

        return ignore

    def _log(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning(
                "requests have the unknown field %.200s, which is ignored; --unknown-fields refuse refuses them", name
            )

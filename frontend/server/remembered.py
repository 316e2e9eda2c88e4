"""What connections remember between their requests, within a bound for all of them together.

When there is no room, the tenant that has most loses what it has had for longest. So nobody may rely on what is
remembered, and a client that finds it gone sends the whole again.
"""

from collections import Counter
from dataclasses import dataclass

MOST_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class Entry:
    """data: None once it is forgotten"""

    tenant: str
    data: bytes | None


class Remembered:
    """The entries of a process."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._entries: dict[Entry, int] = {}  # → its bytes; the oldest first
        self._of_tenants: Counter[str] = Counter()

    def keep(self, tenant: str, data: bytes) -> Entry:
        """Returns an entry with the data; without, if there is more of it than there may be of all."""
        entry = Entry(tenant, None)
        if len(data) > self._most:
            return entry
        while self._of_tenants.total() + len(data) > self._most:
            largest = max(self._of_tenants, key=self._of_tenants.__getitem__)
            self.forget(next(one for one in self._entries if one.tenant == largest))
        entry.data, self._entries[entry] = data, len(data)
        self._of_tenants[tenant] += len(data)
        return entry

    def forget(self, entry: Entry) -> None:
        entry.data = None
        if size := self._entries.pop(entry, 0):
            self._of_tenants[entry.tenant] -= size
            if not self._of_tenants[entry.tenant]:
                del self._of_tenants[entry.tenant]

"""How much each API key has in the store, and how much it may have.

A key's bytes are those of its files, of its batches and their lines, of its conversations, and of its answers. What is
empty counts, too: ROW_BYTES for each file, batch, line and conversation, or else a key could fill the disk with them.
The pieces of an answer count when it has ended. When a new answer does not fit, the oldest ended ones of the key make
room; files, batches and conversations, which are only deleted by their owner or their age, do not.

The functions without `async` are the `work` of a Store (see answers.py).

HeldStreams counts what is in memory: the streams that this process generates, each of which it has as a whole.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from frontend.errors import Overloaded
from frontend.kept import files
from frontend.kept.database import Connection, StoreError
from frontend.kept.files import ROW_BYTES
from frontend.kept.store import Store, Work, delete_ended

T = TypeVar("T")

STORAGE_LIMIT = "storage_limit"  # the code of errors
KNOWN_S = 2.0  # how long a count of a key's bytes is used
MOST_HELD_BYTES = 512 << 20  # all streams that a process generates
REFRESH_S = 10.0  # pause between two counts of all keys, for metrics


@dataclass(slots=True)
class Stored:
    """What a key has. answers: kept answers, running ones included"""

    bytes: int = 0
    answers: int = 0


def of_tenant(db: Connection, tenant: str) -> int:
    """Returns the bytes of a tenant."""
    (own,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM answers WHERE tenant = ?", (tenant,)).fetchone()
    count, metadata = db.execute(
        "SELECT count(*), coalesce(sum(length(metadata)), 0) FROM conversations WHERE tenant = ?", (tenant,)
    ).fetchone()
    (items,) = db.execute(
        "SELECT coalesce(sum(length(item) + length(id)), 0) FROM items WHERE conversation IN "
        "(SELECT id FROM conversations WHERE tenant = ?)",
        (tenant,),
    ).fetchone()  # fmt: skip
    return files.stored_bytes(db, tenant) + int(own + items + metadata + count * ROW_BYTES)


def within(db: Connection, tenant: str, size: int, most: int, work: Work[T]) -> tuple[bool, T | None]:
    """Runs `work`, which adds `size` bytes, if its tenant may have so many. Returns whether it did, and the result.

    most: bytes that a tenant may have; 0: there is no limit
    """
    if most and of_tenant(db, tenant) + size > most:
        return False, None
    return True, work(db)


async def of_all(store: Store) -> dict[str, Stored]:
    """Returns what each key has stored, by the name of the key. Tenants of one key (`KEY/FAIRNESS-ID`) are summed.

    They are counted one after another, so that the store reads for others, too. Raises StoreError.
    """
    found: dict[str, Stored] = defaultdict(Stored)
    for tenant in await store.read(_tenants):
        one = await store.read(partial(_stored, tenant=tenant))
        stored = found[tenant.partition("/")[0]]
        stored.bytes += one.bytes
        stored.answers += one.answers
    return dict(found)


def _tenants(db: Connection) -> list[str]:
    found = db.execute(
        "SELECT tenant FROM answers UNION SELECT tenant FROM conversations UNION SELECT tenant FROM files "
        "UNION SELECT tenant FROM batches"
    )
    return [tenant for (tenant,) in found]


def _stored(db: Connection, tenant: str) -> Stored:
    (count,) = db.execute("SELECT count(*) FROM answers WHERE tenant = ?", (tenant,)).fetchone()
    return Stored(of_tenant(db, tenant), count)


def delete_oldest(db: Connection, tenant: str, most: int) -> int:
    """Deletes the oldest ended answers of a tenant until it has at most `most` bytes. Returns the bytes it has then."""
    stored = of_tenant(db, tenant)  # only once: a tenant may have a million answers
    while stored > most:
        count, freed = delete_ended(db, "tenant = ? AND ended IS NOT NULL", tenant)
        if not count:
            break
        stored -= freed
    return stored


class HeldStreams:
    """The bytes of the streams that this process generates. A tenant may have as many as are free then."""

    def __init__(self, most: int = MOST_HELD_BYTES) -> None:
        self._most = most
        self._of_tenants: Counter[str] = Counter()
        self._all = 0  # their sum, which each token needs

    def fits(self, tenant: str, size: int) -> bool:
        """Whether a tenant may have `size` bytes more."""
        return self._of_tenants[tenant] + size <= self._most - self._all - size

    def add(self, tenant: str, size: int) -> None:
        self._of_tenants[tenant] += size
        self._all += size

    def remove(self, tenant: str, size: int) -> None:
        self._of_tenants[tenant] -= size
        self._all -= size
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]

    def full(self) -> Overloaded:
        """Returns the error of a stream that does not fit any more."""
        return Overloaded(
            f"the streams that are kept and not ended have {self._most >> 20} MiB together, and this client may not "
            "have more of them: ask for fewer at once, or without an id",
            code="streams_full",
        )  # fmt: skip


class Usage:
    """The bytes of the keys, as this process knows them."""

    def __init__(self, store: Store, most: int) -> None:
        """most: bytes that a key may have; 0: there is no limit"""
        self._store, self.most = store, most
        self._known: dict[str, tuple[float, int]] = {}  # tenant → when it was counted, and its bytes

    async def problem(self, tenant: str, size: int) -> str:
        """Returns why a further answer of a tenant is not kept; empty if it is. size: bytes of its request"""
        if not self.most:
            return ""
        now = time.monotonic()
        at, stored = self._known.get(tenant, (-KNOWN_S, 0))
        if now - at >= KNOWN_S:
            try:
                stored = await self._store.read(partial(of_tenant, tenant=tenant))
                if stored + size > self.most:
                    most = max(0, self.most - size)
                    stored = await self._store.write(partial(delete_oldest, tenant=tenant, most=most))
            except StoreError:
                return ""  # the answer says itself that it is not kept
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[tenant] = now, stored
        return f"{limit_text(self.most)}: delete some" if stored + size > self.most else ""


def limit_text(most: int) -> str:
    return (
        f"files, batches, conversations and answers of one API key may have {most} bytes together "
        "(--store-max-key-bytes)"
    )

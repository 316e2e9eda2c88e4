"""Files of OpenAI's Files API in the store: what clients upload, and what batches have put out.

An uploaded file lies in parts, so that neither an upload nor a download is ever in memory as a whole. An output file
has no parts: its content are the outputs of its batch's lines, in their order.

Each function without `async` is the `work` of a Store (see answers.py).
"""

import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from frontend.errors import NotFound
from frontend.kept.database import Connection
from frontend.kept.store import Store

ROW_BYTES = 256  # what a row takes on the disk beside its texts, with its place in the indexes
PART_BYTES = 1 << 20  # size of a part; the last one is smaller
LINES_AT_ONCE = 32  # how many outputs of lines are read at a time
_COLUMNS = "id, tenant, created, expires, filename, purpose, bytes, whole, batch, states"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A row. Times are in seconds since 1970.

    expires: when it is deleted; None: by --store-max-age
    whole: whether its upload has ended; other files exist for nobody
    batch, states: of an output file, the batch and the states of the lines that it has; else empty
    """

    id: str
    tenant: str
    created: int
    expires: float | None
    filename: str
    purpose: str
    bytes: int
    whole: bool
    batch: str = ""
    states: str = ""

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created,
            "expires_at": None if self.expires is None else int(self.expires), "filename": self.filename,
            "purpose": self.purpose, "status": "processed", "status_details": None,
        }  # fmt: skip


def insert(db: Connection, one: KeptFile) -> None:
    db.execute(
        f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (one.id, one.tenant, one.created, one.expires, one.filename, one.purpose, one.bytes, one.whole, one.batch,
         one.states),
    )  # fmt: skip


def count(db: Connection, id: str, size: int) -> None:
    """Counts that a file which arrives has `size` bytes."""
    db.execute("UPDATE files SET bytes = ? WHERE id = ?", (size, id))


def add_part(db: Connection, id: str, number: int, packed: bytes) -> None:
    """Adds a part of a file. packed: its bytes, compressed by zlib"""
    db.execute("INSERT INTO file_parts VALUES (?, ?, ?)", (id, number, packed))


def complete(db: Connection, one: KeptFile) -> None:
    """Ends an upload: the file exists from now on."""
    db.execute(
        "UPDATE files SET whole = TRUE, bytes = ?, filename = ?, purpose = ?, expires = ? WHERE id = ?",
        (one.bytes, one.filename, one.purpose, one.expires, one.id),
    )


def find(db: Connection, id: str, tenant: str) -> KeptFile | None:
    found = db.execute(
        f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND whole AND (expires IS NULL OR expires > ?)",
        (id, tenant, time.time()),
    ).fetchone()
    return found and KeptFile(*found)


def listed(db: Connection, tenant: str, purpose: str, most: int) -> list[KeptFile]:
    """Returns the newest files of a tenant, newest first. purpose: empty for all"""
    found = db.execute(
        f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND whole AND (? = '' OR purpose = ?) "
        "AND (expires IS NULL OR expires > ?) ORDER BY created DESC, rowid DESC LIMIT ?",
        (tenant, purpose, purpose, time.time(), most),
    )
    return [KeptFile(*row) for row in found]


def delete(db: Connection, id: str) -> None:
    """Deletes a file; of an output file also the outputs, so that their bytes are free."""
    (batch, states) = db.execute("SELECT batch, states FROM files WHERE id = ?", (id,)).fetchone() or ("", "")
    for state in states.split():
        db.execute(
            "UPDATE batch_lines SET output = ?, bytes = 0 WHERE batch = ? AND state = ?", (b"", batch, state)
        )  # fmt: skip
    db.execute("DELETE FROM file_parts WHERE file = ?", (id,))
    db.execute("DELETE FROM files WHERE id = ?", (id,))


def stored_bytes(db: Connection, tenant: str) -> int:
    """Returns the bytes of a tenant's files, and of its batches with their waiting lines and their outputs.

    A batch whose lines are not read yet has the bytes of its input file.
    """
    uploads, size = db.execute(
        "SELECT count(*), coalesce(sum(CASE batch WHEN '' THEN bytes ELSE 0 END), 0) FROM files WHERE tenant = ?",
        (tenant,),
    ).fetchone()  # fmt: skip
    batches, texts = db.execute(
        "SELECT count(*), coalesce(sum(length(metadata) + length(errors)), 0) FROM batches WHERE tenant = ?", (tenant,)
    ).fetchone()
    lines, outputs = db.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM batch_lines WHERE batch IN "
        "(SELECT id FROM batches WHERE tenant = ?)",
        (tenant,),
    ).fetchone()  # fmt: skip
    (unread,) = db.execute(
        "SELECT coalesce(sum(files.bytes), 0) FROM batches JOIN files ON files.id = input_file "
        "WHERE batches.tenant = ? AND status = 'validating'",
        (tenant,),
    ).fetchone()
    return int(size + texts + outputs + unread + (uploads + batches + lines) * ROW_BYTES)


def part(db: Connection, id: str, number: int) -> bytes | None:
    """Returns a part as it was uploaded; None: there is no further part."""
    found = db.execute("SELECT data FROM file_parts WHERE file = ? AND number = ?", (id, number)).fetchone()
    return found and zlib.decompress(found[0])


def outputs(db: Connection, batch: str, states: str, after: int) -> list[tuple[int, bytes]]:
    """Returns number and output of the next lines after the number `after` that are in one of these states."""
    wanted = states.split()
    found = db.execute(
        f"SELECT number, output FROM batch_lines WHERE batch = ? AND number > ? "
        f"AND state IN ({', '.join('?' * len(wanted))}) ORDER BY number LIMIT {LINES_AT_ONCE}",
        (batch, after, *wanted),
    )  # fmt: skip
    return [(number, zlib.decompress(data) if data else b"") for number, data in found]


async def existing(store: Store, id: str, tenant: str, param: str | None = None) -> KeptFile:
    """Returns a file. Raises NotFound, also for one of another tenant, and StoreError."""
    found = await store.read(partial(find, id=id, tenant=tenant))
    if found is None:
        raise NotFound(f"there is no file {id!r:.80}", param=param, code="file_not_found")
    return found


async def content(store: Store, file: KeptFile) -> AsyncIterator[bytes]:
    """Yields the bytes of a file, part by part."""
    if file.batch:
        async for data in lines_of(store, file.batch, file.states):
            yield data
        return
    number = 0
    while True:
        found: bytes | None = await store.read(partial(part, id=file.id, number=number))
        if found is None:
            return
        yield found
        number += 1


async def lines_of(store: Store, batch: str, states: str) -> AsyncIterator[bytes]:
    """Yields the outputs of a batch's lines that are in one of these states, in the order of the lines."""
    after = -1
    while found := await store.read(partial(outputs, batch=batch, states=states, after=after)):
        after = found[-1][0]
        yield b"".join([data for _, data in found])

"""Kept answers as rows: what is written of each, and who may read and continue it.

An answer belongs to one tenant (the name of an API key), and for everyone else it does not exist. While it is
generated, it has one owner, a process; `epoch` grows with each change of owner, and a write with an older epoch has no
effect. So two processes can never write to one answer.

Each function here is the `work` of a Store: it takes the connection, and runs in the store's thread.
"""

import sqlite3
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.kept.store import DEAD_S, Damaged, packed, unpacked

RUNNING = "in_progress"
QUEUED = "queued"
FAILED = "failed"
_COLUMNS = (
    "id, tenant, stream_id, path, created, status, ended, background, listed, body, recipe, response, owner, epoch, "
    "cancelled"
)  # fmt: skip


class Recipe(msgspec.Struct, gc=False):
    """All that an answer is computed from beside its body.

    prompts: the ids of each prompt; a template or tokenizer that changes later does not change them
    seeds: the seed of each choice, drawn or given
    fingerprint: the fingerprint of the workers; others would compute other bits
    """

    prompts: list[list[int]]
    seeds: list[int]
    fingerprint: str
    nonce: str
    created: int
    admission: dict[str, Any]
    echoed: dict[str, Any] = {}  # fields of the response beside those of the request, by name
    earlier: int = 0  # how many items of the body's input come from a conversation


@dataclass(slots=True)
class KeptAnswer:
    """A row. `ended` is None while the answer is generated; `response` is JSON, and empty if there is none."""

    id: str
    tenant: str
    stream_id: str | None
    path: str
    created: int
    status: str
    ended: float | None
    background: bool
    listed: bool  # whether /v1/responses/{id} shows it
    body: bytes
    recipe: Recipe
    response: bytes
    owner: str
    epoch: int
    cancelled: bool


# What arrived of a choice at once: its index, the ids, and whether the choice's end came with them.
Arrival = tuple[int, list[int], bool]


@dataclass(slots=True)
class Piece:
    """Bytes of a stream that were written together, from offset `at` on, and the tokens that they come from.

    The pieces of an answer are numbered from 0. A piece has no bytes if its tokens made no text yet.
    """

    number: int
    at: int
    data: bytes
    arrivals: list[Arrival]


def insert(db: sqlite3.Connection, one: KeptAnswer) -> list[str]:
    """Writes a new answer. Returns the ids of the answers that it replaces: those of its tenant's same stream id."""
    replaced: list[str] = []
    if one.stream_id is not None:
        found = db.execute(
            "SELECT id FROM answers WHERE tenant = ? AND stream_id = ? AND id != ?", (one.tenant, one.stream_id, one.id)
        )
        replaced = [id for (id,) in found]
        for id in replaced:
            _replace(db, id)
    texts = packed(one.body), packed(msgspec.json.encode(one.recipe)), packed(one.response)
    db.execute(
        f"INSERT INTO answers ({_COLUMNS}, bytes) VALUES ({', '.join('?' * 16)})",
        (
            one.id, one.tenant, one.stream_id, one.path, one.created, one.status, one.ended, one.background, one.listed,
            *texts, one.owner, one.epoch, one.cancelled, sum(map(len, texts)),
        ),
    )  # fmt: skip
    return replaced


def _replace(db: sqlite3.Connection, id: str) -> None:
    """Takes the stream's id from an answer, and ends it if nothing else shows it."""
    db.execute("UPDATE answers SET stream_id = NULL, cancelled = cancelled OR NOT listed WHERE id = ?", (id,))


def find(db: sqlite3.Connection, id: str, tenant: str) -> KeptAnswer | None:
    return _row(db, "id = ? AND tenant = ?", id, tenant)


def find_stream(db: sqlite3.Connection, stream_id: str, tenant: str) -> KeptAnswer | None:
    return _row(db, "stream_id = ? AND tenant = ?", stream_id, tenant)


def streams_of(
    db: sqlite3.Connection, tenant: str, most: int, shown: Callable[[KeptAnswer], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns what `shown` makes of the newest answers of a tenant whose streams have an id, newest first.

    A damaged answer is left out. `shown` is called here because requests may be large: only one is in memory at a time.
    """
    found = db.execute(
        "SELECT id FROM answers WHERE tenant = ? AND stream_id IS NOT NULL ORDER BY created DESC, rowid DESC LIMIT ?",
        (tenant, most),
    ).fetchall()  # fmt: skip
    rows = []
    for (id,) in found:
        with suppress(Damaged):
            if (row := any_of(db, id)) is not None:
                rows.append(shown(row))
    return rows


def any_of(db: sqlite3.Connection, id: str) -> KeptAnswer | None:
    """Returns an answer of any tenant, for its owner."""
    return _row(db, "id = ?", id)


def _row(db: sqlite3.Connection, which: str, *values: str) -> KeptAnswer | None:
    found = db.execute(f"SELECT {_COLUMNS} FROM answers WHERE {which}", values).fetchone()
    if found is None:
        return None
    one = KeptAnswer(*found)
    one.body, one.response = unpacked(one.body), unpacked(one.response or b"")
    one.recipe = msgspec.json.decode(unpacked(found[10]), type=Recipe)
    return one


def append(db: sqlite3.Connection, id: str, epoch: int, pieces: Sequence[Piece]) -> bool:
    """Adds pieces. Returns False, and adds none, if the answer is deleted or has another owner."""
    found = db.execute(
        "SELECT status FROM answers WHERE id = ? AND epoch = ? AND ended IS NULL", (id, epoch)
    ).fetchone()
    if found is None:
        return False
    if found[0] != RUNNING:  # written once: the row has the whole request
        db.execute("UPDATE answers SET status = ? WHERE id = ?", (RUNNING, id))
    db.executemany(
        "INSERT INTO pieces (answer, number, at, data, tokens, crc) VALUES (?, ?, ?, ?, ?, ?)",
        [(id, one.number, one.at, one.data, tokens, _checksum(one.number, one.at, one.data, tokens))
         for one in pieces for tokens in (_tokens(one.arrivals),)],
    )  # fmt: skip
    return True


def _checksum(number: int, at: int, data: bytes, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(data, zlib.crc32(b"%d %d" % (number, at))))


def end(db: sqlite3.Connection, id: str, epoch: int, status: str, response: bytes | None) -> bool:
    """Ends an answer. Returns False if it is deleted or has another owner."""
    changed = db.execute(
        "UPDATE answers SET status = :status, response = coalesce(:response, response), ended = :now, owner = '', "
        "bytes = length(body) + length(recipe) + coalesce(length(coalesce(:response, response)), 0) + "
        "(SELECT coalesce(sum(length(data) + length(tokens)), 0) FROM pieces WHERE answer = :id) "
        "WHERE id = :id AND epoch = :epoch AND ended IS NULL",
        {"status": status, "response": None if response is None else packed(response), "now": time.time(), "id": id,
         "epoch": epoch},
    )  # fmt: skip
    return bool(changed.rowcount)


def fail(db: sqlite3.Connection, id: str) -> None:
    """Ends an answer that is damaged in the file, so that no process tries to go on with it."""
    db.execute(
        "UPDATE answers SET status = ?, ended = ?, owner = '' WHERE id = ? AND ended IS NULL", (FAILED, time.time(), id)
    )


def release(db: sqlite3.Connection, id: str, epoch: int) -> None:
    """Gives an answer up, so that another process goes on with it."""
    db.execute("UPDATE answers SET owner = '' WHERE id = ? AND epoch = ? AND ended IS NULL", (id, epoch))


def claim(db: sqlite3.Connection, id: str, owner: str) -> KeptAnswer | None:
    """Makes `owner` the owner of a running answer whose process is gone. None: it has ended, or its process lives."""
    changed = db.execute(
        "UPDATE answers SET owner = ?, epoch = epoch + 1 WHERE id = ? AND ended IS NULL AND owner != ? "
        "AND owner NOT IN (SELECT id FROM owners WHERE seen > ?)",
        (owner, id, owner, time.time() - DEAD_S),
    )  # fmt: skip
    return _row(db, "id = ?", id) if changed.rowcount else None


def orphans(db: sqlite3.Connection) -> list[str]:
    """Returns the ids of background answers whose process is gone, oldest first."""
    found = db.execute(
        "SELECT id FROM answers WHERE ended IS NULL AND background AND owner NOT IN "
        "(SELECT id FROM owners WHERE seen > ?) ORDER BY created LIMIT 16",
        (time.time() - DEAD_S,),
    )  # fmt: skip
    return [id for (id,) in found]


def cancel(db: sqlite3.Connection, id: str) -> None:
    """Asks the owner of a running answer to end it."""
    db.execute("UPDATE answers SET cancelled = 1 WHERE id = ? AND ended IS NULL", (id,))


def to_cancel(db: sqlite3.Connection, owner: str) -> list[str]:
    """Returns this process's running answers that another process has been asked to end."""
    found = db.execute("SELECT id FROM answers WHERE owner = ? AND ended IS NULL AND cancelled", (owner,))
    return [id for (id,) in found]


def delete(db: sqlite3.Connection, id: str) -> None:
    """Deletes an answer. Its owner notices at its next write."""
    db.execute("DELETE FROM pieces WHERE answer = ?", (id,))
    db.execute("DELETE FROM answers WHERE id = ?", (id,))


def pieces_of(db: sqlite3.Connection, id: str, start: int = 0) -> list[Piece]:
    """Returns the pieces of a stream that have bytes from the offset `start` on, in order; 0: all pieces.

    Raises Damaged if one has other bytes than were written.
    """
    found = db.execute(
        "SELECT number, at, data, tokens, crc FROM pieces WHERE answer = ? AND (? = 0 OR at + length(data) > ?) "
        "ORDER BY number",
        (id, start, start),
    )  # fmt: skip
    return [_piece(*row) for row in found]


def _piece(number: int, at: int, data: bytes, tokens: bytes, crc: int | None) -> Piece:
    if crc is not None and crc != _checksum(number, at, data, tokens):
        raise Damaged
    return Piece(number, at, data, _arrivals(tokens))


def _tokens(arrivals: Sequence[Arrival]) -> bytes:
    flat = array("I")
    for index, ids, ended in arrivals:
        flat.extend((index, ended, len(ids), *ids))
    return flat.tobytes()


def _arrivals(data: bytes) -> list[Arrival]:
    flat, found, at = array("I", data).tolist(), [], 0
    while at < len(flat):
        index, ended, count = flat[at : at + 3]
        found.append((index, flat[at + 3 : at + 3 + count], bool(ended)))
        at += 3 + count
    return found

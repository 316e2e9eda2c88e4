"""Kept answers as rows: what is written of each, and who may read and continue it.

An answer belongs to one tenant (the name of an API key), and for everyone else it does not exist. While it is
generated, it has one owner, a process; `epoch` grows with each change of owner, and a write with an older epoch has no
effect. So two processes can never write to one answer.

Each function here is the `work` of a Store: it takes the connection, and runs in the store's thread.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from frontend.kept.database import Connection, Damaged
from frontend.kept.store import DEAD_S, packed, unpacked

T = TypeVar("T")
RUNNING = "in_progress"
QUEUED = "queued"
FAILED = "failed"
LAST = 1 << 62  # number and offset of the piece that says that others are missing
ALIVE = f"(SELECT id FROM owners WHERE seen > clock() - {DEAD_S})"  # processes that have shown themselves lately
_CLAIMABLE = f"ended IS NULL AND owner != ? AND owner NOT IN {ALIVE}"
SLICE_BYTES = 256 << 10  # of a stream that are read, and kept for one reader, at a time
PIECES_AT_ONCE = 4  # are fetched from the database
BORDER = 0xFFFF_FFFF  # ends the arrivals of a record, where the index of a choice would stand
_COLUMNS = (
    "id, tenant, stream_id, path, created, status, ended, background, listed, body, recipe, response, owner, epoch, "
    "cancelled"
)  # fmt: skip


class Recipe(msgspec.Struct, gc=False):
    """Everything besides its body that an answer is computed from.

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
    echoed: dict[str, Any] = {}  # fields of the response that its request does not have, by name
    earlier: int = 0  # how many items of the body's input come from a conversation
    restarted: bool = False  # whether its stream may have had other events, which were lost in a power cut


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


# What arrived of a choice together: its index, the ids, and whether the choice's end came with them.
Arrival = tuple[int, list[int], bool]


class Record(msgspec.Struct, array_like=True, gc=False):
    """Bytes of a stream that were made together, from offset `at` on, and the tokens that they come from.

    The records of an answer are numbered from 0, whoever owns it. A record has no bytes if its tokens made no text yet.
    """

    answer: str
    epoch: int
    number: int
    at: int
    data: bytes
    arrivals: list[Arrival]


@dataclass(slots=True)
class Piece:
    """A row of a stream: the bytes of the records up to `number`, from offset `at` on.

    writes: the arrivals of each record that has any; empty in the piece that ends an answer
    """

    number: int
    at: int
    data: bytes
    writes: list[list[Arrival]]


def insert(db: Connection, one: KeptAnswer) -> list[str]:
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


def _replace(db: Connection, id: str) -> None:
    """Takes the stream's id from an answer, and ends it if nothing else shows it."""
    db.execute("UPDATE answers SET stream_id = NULL, cancelled = cancelled OR NOT listed WHERE id = ?", (id,))


def find(db: Connection, id: str, tenant: str) -> KeptAnswer | None:
    return _row(db, "id = ? AND tenant = ?", id, tenant)


def find_stream(db: Connection, stream_id: str, tenant: str) -> KeptAnswer | None:
    return _row(db, "stream_id = ? AND tenant = ?", stream_id, tenant)


def streams_of(db: Connection, tenant: str, most: int) -> list[str]:
    """Returns the ids of the newest answers of a tenant whose streams have an id, newest first."""
    found = db.execute(
        "SELECT id FROM answers WHERE tenant = ? AND stream_id IS NOT NULL ORDER BY created DESC, rowid DESC LIMIT ?",
        (tenant, most),
    )  # fmt: skip
    return [id for (id,) in found]


def shown(db: Connection, id: str, show: Callable[[KeptAnswer], T]) -> T | None:
    """Returns what `show` makes of an answer; None if it is deleted or damaged.

    It is called here because requests may be large: only one is in memory at a time.
    """
    with suppress(Damaged):
        return None if (row := any_of(db, id)) is None else show(row)
    return None


def any_of(db: Connection, id: str) -> KeptAnswer | None:
    """Returns an answer of any tenant, for its owner."""
    return _row(db, "id = ?", id)


def _row(db: Connection, which: str, *values: str) -> KeptAnswer | None:
    found = db.execute(f"SELECT {_COLUMNS} FROM answers WHERE {which}", values).fetchone()
    if found is None:
        return None
    one = KeptAnswer(*found)
    one.body, one.response = unpacked(one.body), unpacked(one.response or b"")
    one.recipe = msgspec.json.decode(unpacked(found[10]), type=Recipe)
    return one


def begun(db: Connection, id: str, epoch: int) -> None:
    """Notes that an answer has its first bytes."""
    db.execute("UPDATE answers SET status = ? WHERE id = ? AND epoch = ? AND ended IS NULL", (RUNNING, id, epoch))


def end(db: Connection, id: str, epoch: int, status: str, response: bytes | None, stream: Piece | None) -> bool:
    """Ends an answer. Returns False if it is deleted or has another owner. stream: all its bytes, if they are kept

    They are written as pieces of SLICE_BYTES, so that a reader needs no more of them in memory.
    """
    if db.execute("SELECT 1 FROM answers WHERE id = ? AND epoch = ? AND ended IS NULL", (id, epoch)).fetchone() is None:
        return False
    if stream is not None:
        db.execute("DELETE FROM pieces WHERE answer = ?", (id,))
        starts = range(0, max(1, len(stream.data)), SLICE_BYTES)
        for number, at in enumerate(starts, stream.number - len(starts) + 1):
            _add(db, id, Piece(number, at, stream.data[at : at + SLICE_BYTES], []))
    db.execute(
        "UPDATE answers SET status = :status, response = coalesce(:response, response), ended = :now, owner = '', "
        "bytes = length(body) + length(recipe) + coalesce(length(coalesce(:response, response)), 0) + "
        "(SELECT coalesce(sum(length(data) + length(tokens)), 0) FROM pieces WHERE answer = :id) WHERE id = :id",
        {"status": status, "response": None if response is None else packed(response), "now": time.time(), "id": id},
    )  # fmt: skip
    return True


def _add(db: Connection, id: str, piece: Piece) -> None:
    tokens = _tokens(piece.writes)
    crc = _checksum(piece.number, piece.at, piece.data, tokens)
    db.execute(
        "INSERT INTO pieces (answer, number, at, data, tokens, crc) VALUES (?, ?, ?, ?, ?, ?)",
        (id, piece.number, piece.at, piece.data, tokens, crc),
    )


def _checksum(number: int, at: int, data: bytes, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(data, zlib.crc32(b"%d %d" % (number, at))))


def extend(db: Connection, owner: str, records: Callable[[str], Sequence[Record] | None]) -> None:
    """Adds to every running answer of an owner what its log has beyond the pieces.

    records: returns the records of an answer in order; None: the log has other bytes than were written, so it is not
    known which it has. Such an answer is damaged from then on: a reader could have been shown more than is known.
    """
    running = db.execute("SELECT id, epoch FROM answers WHERE owner = ? AND ended IS NULL", (owner,)).fetchall()
    for id, epoch in running:
        if (found := records(id)) is None:
            _damage(db, id)
        elif later := following(found, epoch, _written(db, id) + 1):
            _add(db, id, _joined(later))


def lose(db: Connection, owner: str) -> None:
    """Notes of the running answers of an owner that its log may lack bytes that were shown.

    They are damaged, because a reader could not go on behind what it has. One in the background begins anew: whoever
    asks for it in the end gets it whole.
    """
    running = db.execute(
        "SELECT id, background AND stream_id IS NULL, recipe FROM answers WHERE owner = ? AND ended IS NULL", (owner,)
    ).fetchall()
    for id, restarts, recipe in running:
        if not restarts:
            _damage(db, id)
            continue
        known = msgspec.json.decode(unpacked(recipe), type=Recipe)
        known.restarted = True
        db.execute("DELETE FROM pieces WHERE answer = ?", (id,))
        db.execute(
            "UPDATE answers SET status = ?, recipe = ? WHERE id = ?", (QUEUED, packed(msgspec.json.encode(known)), id)
        )


def _damage(db: Connection, id: str) -> None:
    db.execute(
        "INSERT INTO pieces (answer, number, at, data, tokens, crc) VALUES (?, ?, ?, ?, ?, -1) "
        "ON CONFLICT (answer, number) DO NOTHING",
        (id, LAST, LAST, b"", b""),
    )


def _written(db: Connection, id: str) -> int:
    """Returns the number of the last record that the pieces of an answer have; -1: none."""
    (number,) = db.execute("SELECT coalesce(max(number), -1) FROM pieces WHERE answer = ?", (id,)).fetchone()
    return int(number)


def following(records: Sequence[Record], epoch: int, number: int) -> list[Record]:
    """Returns the records of an epoch from `number` on, up to the first one that is missing."""
    found: list[Record] = []
    for one in records:
        if one.epoch == epoch and one.number == number + len(found):
            found.append(one)
    return found


def _joined(records: Sequence[Record]) -> Piece:
    data = b"".join([one.data for one in records])
    return Piece(records[-1].number, records[0].at, data, [one.arrivals for one in records if one.arrivals])


def fail(db: Connection, id: str) -> None:
    """Ends an answer that is damaged in the store, so that no process tries to go on with it."""
    found = db.execute("SELECT response FROM answers WHERE id = ? AND ended IS NULL", (id,)).fetchone()
    if found is None:
        return
    response = b""
    with suppress(Damaged):
        response = unpacked(found[0] or b"")
    if response:  # clients that poll the response must learn that it has ended
        error = {"code": "server_error", "message": Damaged().message}
        response = msgspec.json.encode(msgspec.json.decode(response) | {"status": FAILED, "error": error})
    db.execute(
        "UPDATE answers SET status = ?, response = coalesce(?, response), ended = ?, owner = '' WHERE id = ?",
        (FAILED, packed(response) or None, time.time(), id),
    )


def release(db: Connection, id: str, epoch: int, shown: int) -> None:
    """Gives an answer up, so that another process goes on with it.

    shown: how many bytes of its stream were shown. If the pieces have fewer, the answer is damaged
    """
    changed = db.execute("UPDATE answers SET owner = '' WHERE id = ? AND epoch = ? AND ended IS NULL", (id, epoch))
    if not changed.rowcount:
        return
    found = db.execute(
        "SELECT at + length(data) FROM pieces WHERE answer = ? ORDER BY number DESC LIMIT 1", (id,)
    ).fetchone()
    if shown > (found[0] if found else 0):
        _damage(db, id)


def left_by(db: Connection, id: str, owner: str) -> str | None:
    """Returns whose a running answer was that `owner` may claim; "": it was released. None: it may not be claimed."""
    found = db.execute(f"SELECT owner FROM answers WHERE id = ? AND {_CLAIMABLE}", (id, owner)).fetchone()
    return found[0] if found else None


def claim(db: Connection, id: str, owner: str) -> KeptAnswer | None:
    """Makes `owner` the owner of a running answer whose process is gone. None: it has ended, or its process lives."""
    changed = db.execute(
        f"UPDATE answers SET owner = ?, epoch = epoch + 1 WHERE id = ? AND {_CLAIMABLE}",
        (owner, id, owner),
    )
    return _row(db, "id = ?", id) if changed.rowcount else None


def lives(db: Connection, owner: str) -> bool:
    """Whether a process has shown itself lately."""
    return bool(db.execute(f"SELECT 1 WHERE ? IN {ALIVE}", (owner,)).fetchone())


def orphans(db: Connection) -> list[str]:
    """Returns the ids of background answers whose process is gone, oldest first."""
    found = db.execute(
        f"SELECT id FROM answers WHERE ended IS NULL AND background AND owner NOT IN {ALIVE} ORDER BY created LIMIT 16"
    )
    return [id for (id,) in found]


def cancel(db: Connection, id: str) -> None:
    """Asks the owner of a running answer to end it."""
    db.execute("UPDATE answers SET cancelled = TRUE WHERE id = ? AND ended IS NULL", (id,))


def owned(db: Connection, owner: str) -> dict[tuple[str, int], bool]:
    """Returns id and epoch of this process's running answers, and whether another process has asked to end them."""
    found = db.execute("SELECT id, epoch, cancelled FROM answers WHERE owner = ? AND ended IS NULL", (owner,))
    return {(id, epoch): bool(cancelled) for id, epoch, cancelled in found}


def delete(db: Connection, id: str) -> None:
    """Deletes an answer. Its owner notices at its next write."""
    db.execute("DELETE FROM pieces WHERE answer = ?", (id,))
    db.execute("DELETE FROM answers WHERE id = ?", (id,))


def pieces_of(db: Connection, id: str) -> list[Piece]:
    """Returns the pieces of a stream, in order. Raises Damaged if one has other bytes than were written."""
    found = db.execute("SELECT number, at, data, tokens, crc FROM pieces WHERE answer = ? ORDER BY number", (id,))
    return [_piece(*row) for row in found]


def bytes_of(db: Connection, id: str, start: int, records: Callable[[Connection, str, str], Sequence[Record]]) -> bytes:
    """Returns a slice of a stream from the offset `start` on, of those bytes in the pieces and in the log of its owner.

    It has SLICE_BYTES at most, and is empty if there are none yet.

    records: returns what the log of an owner has of an answer. It is read before the pieces: what leaves the log
    meanwhile is in the pieces.
    """
    row = db.execute("SELECT owner, epoch FROM answers WHERE id = ? AND ended IS NULL", (id,)).fetchone()
    logged = records(db, row[0], id) if row is not None and row[0] else ()
    rows = db.execute(
        "SELECT number, at, data, tokens, crc FROM pieces WHERE answer = ? AND at + length(data) > ? "
        "ORDER BY number LIMIT ?",
        (id, start, PIECES_AT_ONCE),
    ).fetchall()  # fmt: skip
    later = following(logged, row[1], _written(db, id) + 1) if logged and len(rows) < PIECES_AT_ONCE else ()
    found = bytearray()
    for one in (*[_piece(*row) for row in rows], *later):
        found += one.data[max(0, start - one.at) :]
        if len(found) >= SLICE_BYTES:
            break
    return bytes(found[:SLICE_BYTES])


def _piece(number: int, at: int, data: bytes, tokens: bytes, crc: int | None) -> Piece:
    if crc is not None and crc != _checksum(number, at, data, tokens):
        raise Damaged
    return Piece(number, at, data, _writes(tokens))


def _tokens(writes: Sequence[Sequence[Arrival]]) -> bytes:
    """Returns the arrivals as 32-bit numbers: index, end, count and ids of each, and a BORDER between two records."""
    flat = array("I")
    for number, arrivals in enumerate(writes):
        if number:
            flat.append(BORDER)
        for index, ids, ended in arrivals:
            flat.extend((index, ended, len(ids), *ids))
    return flat.tobytes()


def _writes(data: bytes) -> list[list[Arrival]]:
    flat, at = array("I", data).tolist(), 0
    writes: list[list[Arrival]] = [[]] if flat else []
    while at < len(flat):
        if flat[at] == BORDER:
            writes.append([])
            at += 1
            continue
        index, ended, count = flat[at : at + 3]
        writes[-1].append((index, flat[at + 3 : at + 3 + count], bool(ended)))
        at += 3 + count
    return writes

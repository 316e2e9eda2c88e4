"""Conversations of the Responses API: lists of items that requests continue and extend.

The functions without `async` are the `work` of a Store, as in answers.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from frontend.errors import BadRequest, NotFound, TooLarge
from frontend.kept.database import Connection
from frontend.kept.store import Store, packed, unpacked

MAX_PAGE, PAGE = 100, 20  # items of a page: at most, and without `limit`
PAGE_BYTES = 8 << 20  # of the items of a page; an item that has more is a page of its own
ITEMS_AT_ONCE = 16  # are fetched from the database
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    created: int
    metadata: Any

    def shown(self) -> dict[str, Any]:
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page of a list a client asks for. order: `asc` or `desc`; after: the id behind which it is"""

    limit: int
    order: str
    after: str | None

    @classmethod
    def of(cls, query: Mapping[str, str], most: int, usual: int) -> "PageQuery":
        """Reads the query of a URL. Raises BadRequest for a bad `limit` or `order`.

        most, usual: how long a page may be, and is without `limit`
        """
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order", code="out_of_range")
        return cls(limit_of(query, most, usual), order, query.get("after"))


def prefix(item: Mapping[str, Any]) -> str:
    """Returns the prefix of an item's id."""
    return PREFIXES.get(item.get("type", "message"), "item")


def shown(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it is read by clients, in which the content of a message is always an array of parts.

    It is stored as it was sent, because a chat template may tell a text from an array of one part.
    """
    if item.get("type", "message") != "message":
        return {**item}
    content = item.get("content")
    if isinstance(content, str):
        answer = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if answer else {"type": "input_text"}
        content = [part | {"text": content}]
    return {"type": "message", **item, "content": content}


def create(db: Connection, id: str, tenant: str, metadata: Any, items: Sequence[Any]) -> None:
    now = time.time()
    db.execute(
        "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", (id, tenant, int(now), now, msgspec.json.encode(metadata))
    )
    add(db, id, items, id.removeprefix("conv_"))


def find(db: Connection, id: str, tenant: str) -> Conversation | None:
    found = db.execute(
        "SELECT id, created, metadata FROM conversations WHERE id = ? AND tenant = ?", (id, tenant)
    ).fetchone()
    return found and Conversation(found[0], found[1], msgspec.json.decode(found[2]))


def update(db: Connection, id: str, metadata: Any) -> None:
    db.execute(
        "UPDATE conversations SET metadata = ?, used = ? WHERE id = ?",
        (msgspec.json.encode(metadata), time.time(), id),
    )  # fmt: skip


def delete(db: Connection, id: str) -> None:
    db.execute("DELETE FROM items WHERE conversation = ?", (id,))
    db.execute("DELETE FROM conversations WHERE id = ?", (id,))


def add(db: Connection, id: str, items: Sequence[Any], nonce: str) -> list[Any]:
    """Adds items at the end, if the conversation still exists, and returns them with their ids, as they are shown.

    nonce: makes the ids of items that have none
    """
    if not db.execute("UPDATE conversations SET used = ? WHERE id = ?", (time.time(), id)).rowcount:
        return []
    added = []
    (count,) = db.execute("SELECT coalesce(max(at) + 1, 0) FROM items WHERE conversation = ?", (id,)).fetchone()
    for at, item in enumerate(items, count):
        named = {"type": "message", **item, "id": item.get("id") or f"{prefix(item)}_{nonce}{at:08x}"}
        db.execute("INSERT INTO items VALUES (?, ?, ?, ?)", (id, at, named["id"], packed(msgspec.json.encode(named))))
        added.append(shown(named))
    return added


# Items are stored compressed, so a conversation may have a thousand times the bytes that it takes in the store.


def _stored(db: Connection, id: str, behind: int | None = None, *, oldest_first: bool = True) -> Iterator[bytes]:
    """Yields the JSON of the items behind the place `behind`, or of all."""
    order, later = ("ASC", ">") if oldest_first else ("DESC", "<")
    while True:
        found = db.execute(
            "SELECT at, item FROM items WHERE conversation = ? "
            f"{'' if behind is None else f'AND at {later} {behind:d}'} ORDER BY at {order} LIMIT {ITEMS_AT_ONCE}",
            (id,),
        ).fetchall()  # fmt: skip
        for _, item in found:
            yield unpacked(item)
        if len(found) < ITEMS_AT_ONCE:
            return
        behind = found[-1][0]


def items(db: Connection, id: str, most: int) -> list[msgspec.Raw] | None:
    """Returns the JSON of all items, oldest first; None: they have more than `most` bytes together."""
    found = []
    for item in _stored(db, id):
        most -= len(item)
        if most < 0:
            return None
        found.append(msgspec.Raw(item))
    return found


def listed(db: Connection, id: str, query: PageQuery) -> tuple[list[Any], bool] | None:
    """Returns a page of items, and whether there are more; None: there is no item `after`."""
    oldest_first, behind = query.order == "asc", None
    if query.after is not None:
        first = "min" if oldest_first else "max"
        (behind,) = db.execute(
            f"SELECT {first}(at) FROM items WHERE conversation = ? AND id = ?", (id, query.after)
        ).fetchone()
        if behind is None:
            return None
    found: list[Any] = []
    size = 0
    for item in _stored(db, id, behind, oldest_first=oldest_first):
        size += len(item)
        if len(found) == query.limit or (found and size > PAGE_BYTES):
            return found, True
        found.append(shown(msgspec.json.decode(item)))
    return found, False


def item(db: Connection, id: str, name: str) -> Any:
    """Returns an item by its id, the oldest of several with this id; None if there is none."""
    found = db.execute("SELECT item FROM items WHERE conversation = ? AND id = ? ORDER BY at", (id, name)).fetchone()
    return found and shown(msgspec.json.decode(unpacked(found[0])))


def delete_item(db: Connection, id: str, name: str) -> bool:
    """Deletes what `item` returns. Returns whether there was one."""
    oldest = "SELECT min(at) FROM items WHERE conversation = :id AND id = :name"
    deleted = db.execute(
        f"DELETE FROM items WHERE conversation = :id AND at = ({oldest})", {"id": id, "name": name}
    ).rowcount
    if deleted:
        db.execute("UPDATE conversations SET used = ? WHERE id = ?", (time.time(), id))
    return deleted > 0


async def existing(store: Store, id: str, tenant: str, param: str | None = None) -> Conversation:
    """Returns a conversation. Raises NotFound, also for one of another tenant, and StoreError."""
    found = await store.read(partial(find, id=id, tenant=tenant))
    if found is None:
        raise NotFound(f"there is no conversation {id!r:.80}", param=param, code="conversation_not_found")
    return found


async def items_of(store: Store, id: str, tenant: str, most: int) -> list[msgspec.Raw]:
    """Returns the JSON of a conversation's items, oldest first.

    Raises NotFound and, if they have more than `most` bytes, TooLarge, which name the field; and StoreError.
    """
    await existing(store, id, tenant, "conversation")
    found = await store.read(partial(items, id=id, most=most))
    if found is None:
        raise TooLarge(
            f"`conversation`: its items have more than the {most} bytes of a body (--max-body-bytes): delete some",
            param="conversation", code="conversation_too_large",
        )  # fmt: skip
    return found


async def page_of(store: Store, id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of a conversation's items as OpenAI lists them. Raises BadRequest and StoreError."""
    asked = PageQuery.of(query, MAX_PAGE, PAGE)
    found = await store.read(partial(listed, id=id, query=asked))
    if found is None:
        raise _nothing_behind(asked)
    return _shown(*found)


def limit_of(query: Mapping[str, str], most: int, usual: int) -> int:
    """Returns the `limit` of a page. Raises BadRequest."""
    limit = query.get("limit", str(usual))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise BadRequest(f"`limit` must be a number from 1 to {most}", param="limit", code="out_of_range")
    return int(limit)


def page(found: Sequence[Any], query: Mapping[str, str], *, most: int = MAX_PAGE, usual: int = PAGE) -> dict[str, Any]:
    """Returns a page of items as OpenAI lists them. Raises BadRequest for a bad `limit`, `order` or `after`.

    found: the items, oldest first
    most, usual: how long a page may be, and is without `limit`
    """
    asked = PageQuery.of(query, most, usual)
    listed = list(found) if asked.order == "asc" else list(reversed(found))
    if asked.after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == asked.after]
        if not places:
            raise _nothing_behind(asked)
        listed = listed[places[0] + 1 :]
    return _shown(listed[: asked.limit], len(listed) > asked.limit)


def _nothing_behind(asked: PageQuery) -> BadRequest:
    return BadRequest(f"`after`: there is no item {asked.after!r:.80}", param="after", code="out_of_range")


def _shown(found: Sequence[Any], has_more: bool) -> dict[str, Any]:
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"object": "list", "data": found, "first_id": first, "last_id": last, "has_more": has_more}

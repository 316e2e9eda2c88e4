"""Conversations of the Responses API: lists of items that requests continue and extend.

The functions without `async` are the `work` of a Store, as in answers.py.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from frontend.errors import BadRequest, NotFound
from frontend.kept.database import Connection
from frontend.kept.store import Store, packed, unpacked

MAX_PAGE, PAGE = 100, 20  # items of a page: at most, and without `limit`
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


def prefix(item: Mapping[str, Any]) -> str:
    """Returns the prefix of an item's id."""
    return PREFIXES.get(item.get("type", "message"), "item")


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


def add(db: Connection, id: str, items: Sequence[Any], nonce: str) -> None:
    """Adds items at the end, if the conversation still exists. nonce: makes the ids of items that have none"""
    if not db.execute("UPDATE conversations SET used = ? WHERE id = ?", (time.time(), id)).rowcount:
        return
    (count,) = db.execute("SELECT coalesce(max(at) + 1, 0) FROM items WHERE conversation = ?", (id,)).fetchone()
    for at, item in enumerate(items, count):
        named = {"type": "message", **item, "id": item.get("id") or f"{prefix(item)}_{nonce}{at:08x}"}
        db.execute("INSERT INTO items VALUES (?, ?, ?, ?)", (id, at, named["id"], packed(msgspec.json.encode(named))))


def items(db: Connection, id: str) -> list[Any]:
    found = db.execute("SELECT item FROM items WHERE conversation = ? ORDER BY at", (id,))
    return [msgspec.json.decode(unpacked(item)) for (item,) in found]


def item(db: Connection, id: str, name: str) -> Any:
    """Returns an item by its id, the oldest of several with this id; None if there is none."""
    found = db.execute("SELECT item FROM items WHERE conversation = ? AND id = ? ORDER BY at", (id, name)).fetchone()
    return found and msgspec.json.decode(unpacked(found[0]))


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


async def items_of(store: Store, id: str, tenant: str) -> list[Any]:
    """Returns the items of a conversation, oldest first. Raises NotFound, which names the field, and StoreError."""
    await existing(store, id, tenant, "conversation")
    return await store.read(partial(items, id=id))


def limit_of(query: Mapping[str, str], most: int, usual: int) -> int:
    """Returns the `limit` of a page. Raises BadRequest."""
    limit = query.get("limit", str(usual))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise BadRequest(f"`limit` must be a number from 1 to {most}", param="limit", code="out_of_range")
    return int(limit)


def page(found: Sequence[Any], query: Mapping[str, str], *, most: int = MAX_PAGE, usual: int = PAGE) -> dict[str, Any]:
    """Returns a page of items as OpenAI lists them. Raises BadRequest for a bad `limit`, `order` or `after`.

    found: the items, oldest first
    most, usual: how long a page may be, and is without `limit`
    """
    order, limit, after = query.get("order", "desc"), limit_of(query, most, usual), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("`order` must be asc or desc", param="order", code="out_of_range")
    listed = list(found) if order == "asc" else list(reversed(found))
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise BadRequest(f"`after`: there is no item {after!r:.80}", param="after", code="out_of_range")
        listed = listed[places[0] + 1 :]
    shown = listed[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {
        "object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(listed) > len(shown),
    }  # fmt: skip

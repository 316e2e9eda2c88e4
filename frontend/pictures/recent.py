"""Keeps decoded pictures for a while: each turn of a chat sends the pictures of the earlier turns again."""

from collections import OrderedDict
from collections.abc import Hashable
from functools import cache
from hashlib import sha256

from frontend.pictures.decoding import Decoded
from frontend.turns import tenant

MAX_BYTES = 64 << 20  # limit for the pixels of all kept pictures


class RecentPictures:
    """An LRU cache of pictures. Keys contain the tenant, so response times do not tell what other tenants sent."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Decoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> Decoded | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def add(self, key: Hashable, picture: Decoded) -> None:
        if key in self._kept:
            return
        self._kept[key] = picture
        self._bytes += picture.nbytes
        while self._bytes > MAX_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def key_of(data: bytes, *how: Hashable) -> Hashable:
    """Returns the key of a file that the present tenant sent. how: what else the decoded picture depends on"""
    return tenant.get(), sha256(data).digest(), *how


@cache
def recent_pictures() -> RecentPictures:
    """Returns the cache of this process."""
    return RecentPictures()

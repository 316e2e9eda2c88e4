"""The prefix cache: finds full pages whose K/V was computed before, by the chain hash of all tokens up to their end.

Knows tokens, digests and the page pool; not sequences, not tensors. A page's digest covers its parent's
digest and its own tokens, and the chain starts from the cache salt: two pages have one digest only if
salt and all tokens up to the page's end are equal (blake2b, 256 bit, so that collisions cannot be constructed).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from worker.kv_cache.pages import PagePool

DIGEST_BYTES = 32


class PrefixCache:
    """Looks up the published pages of one pool by token prefix.

    `digests` belongs to the caller: one list a sequence, kept with its tokens and only ever extended here, so
    that no token is hashed twice.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0  # tokens of sequences that got pages, counted each time they did
        self.hits = 0  # the part of them whose K/V was found

    def extend(self, digests: list[bytes], tokens: list[int], cache_salt: str, pages: int) -> None:
        """Extends `digests` to those of the first `pages` pages, at least."""
        size = self.pool.page_size
        parent = digests[-1] if digests else _digest(cache_salt.encode())
        for end in range((len(digests) + 1) * size, pages * size + 1, size):
            parent = _digest(parent + array("I", tokens[end - size : end]).tobytes())
            digests.append(parent)

    def match(self, digests: list[bytes], tokens: list[int], cache_salt: str) -> list[int]:
        """Pages of the longest published prefix, in order; the last token is never in it, it has to be computed.

        The pages are not shared yet: pool.share() each before anything is acquired.
        """
        full = (len(tokens) - 1) // self.pool.page_size
        self.extend(digests, tokens, cache_salt, full)
        pages: list[int] = []
        for digest in digests[:full]:
            page = self.pool.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, digests: list[bytes], pages: Sequence[int], indices: range) -> None:
        """Publishes the full pages of a sequence at `indices`.

        If another page has the same digest, that one stays published and this one remains private.
        """
        for index in indices:
            self.pool.publish(pages[index], digests[index])

    def count(self, queries: int, hits: int) -> None:
        self.queries += queries
        self.hits += hits


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()

"""Finds K/V that was computed before: full pages under the chain hash of all tokens up to their end.

Knows tokens, digests and the page pool; not sequences, not tensors. A page's digest covers its parent's
digest and its own tokens, and the chain starts from the tenant's salt: two pages have one digest only if
salt and all tokens up to the page's end are equal (blake2b, 256 bit, so that nobody can make two meet).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from worker.kv_cache.pages import PagePool

DIGEST_BYTES = 32


class PrefixCache:
    """The published pages of one pool, asked by token prefix.

    `digests` belongs to the caller: one list a sequence, kept with its tokens and only ever extended here, so
    that no token is hashed twice.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0  # tokens of the sequences that got pages, once each time they did
        self.hits = 0  # tokens of those that were found

    def extend(self, digests: list[bytes], tokens: list[int], salt: str, pages: int) -> None:
        """Brings `digests` to those of the first `pages` pages, at least."""
        size = self.pool.page_size
        parent = digests[-1] if digests else _digest(salt.encode())
        for end in range((len(digests) + 1) * size, pages * size + 1, size):
            parent = _digest(parent + array("I", tokens[end - size : end]).tobytes())
            digests.append(parent)

    def match(self, digests: list[bytes], tokens: list[int], salt: str) -> list[int]:
        """Pages of the longest published prefix, in order; the last token is never in it, it has to be computed.

        The pages are not shared yet: pool.share() each before anything is acquired.
        """
        full = (len(tokens) - 1) // self.pool.page_size
        self.extend(digests, tokens, salt, full)
        pages: list[int] = []
        for digest in digests[:full]:
            page = self.pool.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, digests: list[bytes], pages: Sequence[int], indices: range) -> None:
        """Makes those of a sequence's pages findable. Of two that computed the same, the second keeps its own."""
        for index in indices:
            self.pool.publish(pages[index], digests[index])

    def count(self, queries: int, hits: int) -> None:
        self.queries += queries
        self.hits += hits


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()

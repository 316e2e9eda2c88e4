"""The prefix cache: finds full pages whose K/V was computed before, by the chain hash of all tokens up to their end.

The cache works on tokens, digests and the page pool, and knows neither sequences nor tensors. The digest of a page
covers its tokens and the digest of the page before it, and the chain starts from the cache salt. Two pages therefore
have the same digest only if the salt and all tokens up to the end of the page are equal. The hash is blake2b with 256
bits, so that collisions cannot be constructed.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from worker.kv_cache.pages import PagePool

DIGEST_BYTES = 32


class PrefixCache:
    """Looks up the published pages of one pool by token prefix.

    The caller owns `digests`: one list per sequence, kept with its tokens. The methods only append to it, so that no
    token is hashed twice.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.queries = 0  # tokens of sequences that got pages, counted each time a sequence gets pages
        self.hits = 0  # the tokens among the queries whose K/V was found

    def extend(self, digests: list[bytes], tokens: list[int], cache_salt: str, pages: int) -> None:
        """Appends to `digests` until it covers at least the first `pages` pages."""
        size = self.pool.page_size
        parent = digests[-1] if digests else _digest(cache_salt.encode())
        for end in range((len(digests) + 1) * size, pages * size + 1, size):
            parent = _digest(parent + array("I", tokens[end - size : end]).tobytes())
            digests.append(parent)

    def match(self, digests: list[bytes], tokens: list[int], cache_salt: str) -> list[int]:
        """Returns the pages of the longest published prefix, in order.

        The prefix never includes the last token, because that token has to be computed. The pages are not shared yet:
        call pool.share() for each of them before you acquire any page.
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

        If another page already has the same digest, it stays published, and the page of this sequence is private.
        """
        for index in indices:
            self.pool.publish(pages[index], digests[index])

    def count(self, queries: int, hits: int) -> None:
        self.queries += queries
        self.hits += hits


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()

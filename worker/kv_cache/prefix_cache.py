"""The prefix cache: finds full pages whose K/V was computed before, by the chain hash of all tokens up to their end.

The cache works on tokens, digests and the page pool, and knows neither sequences nor tensors. The digest of a page
covers its tokens and the digest of the page before it, and the chain starts from the identity of the prefix (the text
of a PrefixIdentity, shared/prefix_identity.py) and the number of times that the cache was emptied. Two pages therefore
have the same digest only if both, all tokens up to the end of the page, and all images among these tokens are equal.
The hash is blake2b with 256 bits, so that collisions cannot be constructed.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from worker.kv_cache.pages import SCRATCH, PagePool

DIGEST_BYTES = 32
Mark = Callable[[int, int], bytes]  # (begin, end) → bytes that the page with tokens begin .. end - 1 is hashed with


class PrefixCache:
    """Looks up published pages by token prefix, in one or more groups of layers, each with a pool of its own.

    All groups cut a sequence into the same pages, so a page has the same digest in every group. If layers have a
    recurrent state, `states` is the pool of its slots. The state at the end of a full page has this page's digest.

    The caller owns `digests`: one list per sequence. The methods only append to it, so that no token is hashed twice.
    """

    def __init__(self, pools: Sequence[PagePool], states: PagePool | None = None) -> None:
        self.pools = tuple(pools)
        self.states = states
        self.queries = 0  # tokens of sequences that got pages, counted each time a sequence gets pages
        self.hits = 0  # tokens among the queries whose K/V was found
        self._generation = 0  # how often the cache was emptied
        self._page_size = pools[0].page_size
        self._windowed = [pool for pool in pools if pool.window]

    def extend(
        self, digests: list[bytes], tokens: list[int], identity: str, pages: int, mark: Mark | None = None
    ) -> None:
        """Appends to `digests` until it covers at least the first `pages` pages."""
        self.extend_from(b"%d %s" % (self._generation, identity.encode()), digests, tokens, pages, mark)

    def extend_from(
        self, root: bytes, digests: list[bytes], tokens: list[int], pages: int, mark: Mark | None = None
    ) -> None:
        """Does what extend() does, with a chain that starts from `root`."""
        size = self._page_size
        parent = digests[-1] if digests else _digest(root)
        for end in range((len(digests) + 1) * size, pages * size + 1, size):
            marked = b"" if mark is None else mark(end - size, end)
            parent = _digest(parent + array("I", tokens[end - size : end]).tobytes() + marked)
            digests.append(parent)

    def match(
        self, digests: list[bytes], tokens: list[int], identity: str, most: int | None = None, mark: Mark | None = None
    ) -> list[list[int]]:
        """Returns for each group the pages, in order, of the longest cached prefix that all groups can continue from.

        A group with a window needs only the pages that the next row reads; the entries before these are SCRATCH. Layers
        with a recurrent state need the state after the prefix.

        The prefix never includes the last token, because that token has to be computed. The pages are not shared yet:
        call pool.share() for each of them before you acquire any page.

        most: the maximum length of the prefix, in tokens; None: all tokens but the last
        """
        full = min(len(tokens) - 1, len(tokens) if most is None else most) // self._page_size
        self.extend(digests, tokens, identity, full, mark)
        known = digests[:full]
        for pool in self.pools:
            if not pool.window:
                known = known[: len(pool.find_run(known))]
        if self._windowed or self.states is not None:
            del known[self._resumable(known) :]
        found = []
        for pool in self.pools:
            first = pool.first_needed(len(known) * self._page_size)
            found.append([SCRATCH] * first + pool.find_run(known[first:]))
        return found

    def _resumable(self, digests: list[bytes]) -> int:
        """Returns the greatest number of these pages after which a sequence can continue.

        After them, every window has the pages that it needs, and if layers are recurrent, there is a cached state.
        """
        longest, runs = 0, [0] * len(self._windowed)  # runs: for each pool, published pages in a row up to `count`
        for count, digest in enumerate(digests, 1):
            complete = self.states is None or self.states.find(digest) is not None
            for index, pool in enumerate(self._windowed):
                runs[index] = runs[index] + 1 if pool.find(digest) is not None else 0
                complete &= runs[index] >= count - pool.first_needed(count * self._page_size)
            if complete:
                longest = count
        return longest

    def publish(self, digests: list[bytes], pages: Sequence[Sequence[int]], indices: range) -> None:
        """Publishes the full pages of a sequence at `indices`, in every group.

        If another page already has the same digest, that page stays published, and this sequence's page is private.
        """
        for pool, own in zip(self.pools, pages, strict=True):
            for index in indices:
                if own[index] != SCRATCH:  # a prefix from the K/V store has only the last pages of a window
                    pool.publish(own[index], digests[index])

    def clear(self) -> None:
        """Empties the cache for sequences that are submitted from now on.

        The pages and slots of running sequences stay published, under digests that no new sequence has: the slot of a
        shared recurrent state must stay marked as published, so that no sequence writes to it.
        """
        self._generation += 1
        for pool in (*self.pools, *([self.states] if self.states is not None else [])):
            pool.forget_cached()

    def count(self, queries: int, hits: int) -> None:
        self.queries += queries
        self.hits += hits


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()

"""The data with which a sequence finds and shares pages in the prefix cache (worker/kv_cache/prefix_cache.py)."""

from dataclasses import dataclass, field

from worker.kv_cache.prefix_cache import Mark


@dataclass(slots=True)
class SharedPrefix:
    """A sequence's data for the prefix cache."""

    salt: str = ""  # only sequences with the same salt share cached prefixes
    digests: list[bytes] = field(default_factory=list)  # the digests of its first full pages
    mark: Mark | None = None  # returns the bytes that stand for pictures in a page's digest; None: no pictures
    claimed_tokens: int = 0  # tokens found in the cache when the sequence got its pages; the others must be computed
    cached_tokens: int = 0  # prompt and earlier output tokens found in the cache at the first admission

"""What a sequence shares with others through the prefix cache (worker/kv_cache/prefix_cache.py)."""

from dataclasses import dataclass, field

from worker.kv_cache.prefix_cache import Mark


@dataclass(slots=True)
class SharedPrefix:
    """The prefix of a sequence, as the prefix cache knows it."""

    salt: str = ""  # only sequences with the same salt share cached prefixes
    digests: list[bytes] = field(default_factory=list)  # of its full pages
    mark: Mark | None = None  # what pages are hashed with besides tokens: the pictures of a prompt that has some
    claimed_tokens: int = 0  # found in the cache when it got its pages; it computes those after them
    cached_tokens: int = 0  # prompt and earlier output tokens found in the cache at the first admission

"""What makes two equal runs of token ids the same prefix, so that what was computed for one serves the other.

The identity is one text, which `Submit.cache_salt` carries. The digests of the prefix cache begin with this text
(worker/kv_cache/prefix_cache.py), and a frontend remembers under the text and the token ids which worker computed a
prefix (frontend/workers/routing.py). Both compare the text and never take it apart.

By the key of a prefix, workers tell frontends what their prefix caches have (worker/kv_events/prefix_report.py). A key
is 32 bits of a hash of the first tokens of a prompt. Two prefixes have the same key about once in four billion pairs;
then a request goes to a worker that has nothing of it in its cache, and nothing else happens, because what a worker
computes with is found by the long digests of its own cache.
"""

from dataclasses import dataclass
from hashlib import blake2b

from shared.messages import Adapter

PREFIX_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens
MARK = "lora:"  # what the text of a request with an adapter begins with, and no other text


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The identity of the prefixes of a request. Requests share prefixes only if their identities have equal texts.

    A value that changes the K/V of every token belongs here, as the hash of an adapter: as one more field, and as a
    line of the text before the others. The text of a request with the value must differ from all texts without it. A
    value that belongs to some positions only, such as the digest of a picture, does not belong here, but to the pages
    of these positions, whose tokens PrefixCache.extend hashes.
    """

    salt: str = ""  # what the request says
    tenant: str = ""  # whose requests alone share prefixes; "" if those of all tenants do
    adapter: Adapter | None = None  # that the prefix is computed with

    @property
    def text(self) -> str:
        """The text. No name of a tenant has a line break, so tenants cannot reach each other's prefixes by a salt."""
        text = f"{self.tenant}\n{self.salt}" if self.tenant else self.salt
        if self.adapter is None:
            return f"{MARK}\n{text}" if text.startswith(MARK) else text
        return f"{first_line(self.adapter)}{text}"


def first_line(adapter: Adapter | None) -> str:
    """Returns what the text of a request with this adapter begins with."""
    return f"{MARK}{'' if adapter is None else adapter.identity}\n"


def fits(text: str, adapter: Adapter | None) -> bool:
    """Returns whether a text may be that of a request with this adapter, or without one."""
    return text.startswith(first_line(adapter)) or (adapter is None and not text.startswith(MARK))


def prefix_keys(prompt: bytes, identity: str) -> list[int]:
    """Returns the keys of the prefixes of PREFIX_LENGTHS that a prompt has, the shortest first.

    prompt: packed token ids (pack_u32)
    identity: the text of a PrefixIdentity
    """
    hashed, keys, begin = blake2b(digest_size=4, key=_key(identity)), list[int](), 0
    for length in PREFIX_LENGTHS:
        if len(prompt) < 4 * length:
            break
        hashed.update(prompt[begin : 4 * length])
        begin = 4 * length
        keys.append(int.from_bytes(hashed.copy().digest(), "little"))
    return keys


def _key(identity: str) -> bytes:
    """Returns a key of at most 64 bytes for blake2b."""
    return blake2b(identity.encode(), digest_size=16).digest() if identity else b""

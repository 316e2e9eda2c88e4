"""Defines when two requests may share the K/V of equal token ids: when their prefix identities are equal.

The identity is one text, which `Submit.cache_salt` carries. The prefix cache hashes this text before the first page
of a prompt (worker/kv_cache/prefix_cache.py), and a frontend remembers under the text and the token ids which worker
computed a prefix (frontend/workers/routing.py). Worker and frontend compare the text and never take it apart.

Workers tell frontends by keys which prefixes their caches hold (worker/engine/prefix_report.py). A key is 32 bits
of a hash of the first tokens of a prompt. Two prefixes have the same key about once in four billion pairs. If they
do, a request may go to a worker that has no part of its prefix in the cache; the answer is still right, because a
worker finds pages by the long digests of its own cache.
"""

from dataclasses import dataclass
from hashlib import blake2b

from shared.messages import Adapter

PREFIX_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens
MARK = "lora:"  # only the texts of requests with an adapter begin with this


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The identity of the prefixes of a request. Requests share prefixes only if their identities have equal texts.

    A value that changes the K/V of every token, such as the hash of an adapter, gets a field here, and a line of the
    text before the other lines. The text of a request with the value must differ from all texts without the value. A
    value that belongs to some positions only, such as the digest of an image, does not belong here, but to the pages
    of these positions, whose tokens PrefixCache.extend hashes.
    """

    salt: str = ""  # the cache salt that the request states
    tenant: str = ""  # if not empty, only requests of this tenant share prefixes; "": all tenants share them
    adapter: Adapter | None = None  # the adapter that the prefix is computed with

    @property
    def text(self) -> str:
        """The text. No name of a tenant has a line break, so tenants cannot reach each other's prefixes by a salt."""
        text = f"{self.tenant}\n{self.salt}" if self.tenant else self.salt
        if self.adapter is None:
            return f"{MARK}\n{text}" if text.startswith(MARK) else text
        return f"{first_line(self.adapter)}{text}"


def first_line(adapter: Adapter | None) -> str:
    """Returns the first line of the text of a request with this adapter."""
    return f"{MARK}{'' if adapter is None else adapter.identity}\n"


def without_adapter(text: str) -> str:
    """Returns the part of a text that says who shares: the tenant and the salt. Equal for all adapters."""
    return text.partition("\n")[2] if text.startswith(MARK) else text


def fits(text: str, adapter: Adapter | None) -> bool:
    """Returns whether `text` may belong to a request with this adapter; None: to a request without an adapter."""
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
    """Returns the identity as the key of a keyed blake2b hash, which takes at most 64 bytes."""
    return blake2b(identity.encode(), digest_size=16).digest() if identity else b""

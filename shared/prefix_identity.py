"""What makes two equal runs of token ids the same prefix, so that what was computed for one serves the other.

The identity is one text, which `Submit.cache_salt` carries. The digests of the prefix cache begin with this text
(worker/kv_cache/prefix_cache.py), and a frontend remembers under the text and the token ids which worker computed a
prefix (frontend/workers/routing.py). Both compare the text and never take it apart.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The identity of the prefixes of a request. Requests share prefixes only if their identities have equal texts.

    A value that changes the K/V of every token, such as the hash of an adapter, belongs here: as one more field, and
    as a line of the text before the salt. The text of a request without this value must stay as it is. A value that
    belongs to some positions only, such as the digest of a picture, does not belong here, but to the pages of these
    positions, whose tokens PrefixCache.extend hashes.
    """

    salt: str = ""  # what the request says
    tenant: str = ""  # whose requests alone share prefixes; "" if those of all tenants do

    @property
    def text(self) -> str:
        """The text. No name of a tenant has a line break, so tenants cannot reach each other's prefixes by a salt."""
        return f"{self.tenant}\n{self.salt}" if self.tenant else self.salt

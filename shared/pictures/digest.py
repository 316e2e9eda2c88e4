"""The hash of a picture. Caches treat pictures with equal hashes as the same picture."""

import hashlib


def picture_digest(height: int, width: int, pixels: bytes) -> bytes:
    """Returns the sha256 over height and width, each in four bytes (little-endian), and the pixels."""
    head = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    digest = hashlib.sha256(head)
    digest.update(pixels)
    return digest.digest()


def digest_among(digest: bytes, sharers: str) -> bytes:
    """Returns the digest under which a cache keeps a picture for those who share it, so that others do not find it.

    sharers: the text that only requests which may share have in common; empty: all requests share
    """
    return hashlib.blake2b(digest, key=hashlib.sha256(sharers.encode()).digest()).digest()[:32] if sharers else digest

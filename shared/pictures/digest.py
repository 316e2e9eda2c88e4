"""The hash of a picture. Caches treat pictures with equal hashes as the same picture."""

import hashlib


def picture_digest(height: int, width: int, pixels: bytes) -> bytes:
    """Returns the sha256 over height and width, each in four bytes (little-endian), and the pixels."""
    head = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    digest = hashlib.sha256(head)
    digest.update(pixels)
    return digest.digest()

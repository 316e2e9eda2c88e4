"""The hash of a picture. Two pictures with equal hashes are the same picture wherever one could stand for the other."""

import hashlib


def picture_digest(height: int, width: int, pixels: bytes) -> bytes:
    """Returns the sha256 over height and width, each in four bytes (little-endian), and the pixels."""
    head = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    digest = hashlib.sha256(head)
    digest.update(pixels)
    return digest.digest()

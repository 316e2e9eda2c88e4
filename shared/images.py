"""Images in requests: data: URLs, digests, the identity of an image in a prompt, and limits."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from shared.messages import PromptImage

MAX_BYTES = 20 << 20  # largest file
BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def data_url(data: bytes) -> str:
    """Returns the data: URL of a file's bytes. Raises ValueError; its message continues a sentence about the file."""
    kind = next((kind for beginning, kind in BEGINNINGS.items() if data.startswith(beginning)), None)
    if kind is None or (kind == "webp" and data[8:12] != b"WEBP"):
        raise ValueError("is no PNG, JPEG, WebP or GIF")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def file_as_url(path: Path) -> str:
    """Returns the data: URL of a file. Raises ValueError; its message continues a sentence about the file."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES >> 20} MiB")
    return data_url(data)


# The hash of an image. Caches treat images with equal hashes as the same image.


def image_digest(height: int, width: int, pixels: bytes) -> bytes:
    """Returns the sha256 over height and width, each in four bytes (little-endian), and the pixels."""
    head = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    digest = hashlib.sha256(head)
    digest.update(pixels)
    return digest.digest()


def digest_among(digest: bytes, sharers: str) -> bytes:
    """Returns the digest under which a cache keeps an image for those who share it, so that others do not find it.

    sharers: the text that only requests which may share have in common; empty: all requests share
    """
    return hashlib.blake2b(digest, key=hashlib.sha256(sharers.encode()).digest()).digest()[:32] if sharers else digest


# Makes prompts with images comparable. All images have the same placeholders, so digests replace them.


def with_digests(prompt: bytes, images: Sequence[PromptImage]) -> bytes:
    """Returns a packed prompt with the digest of each image, repeated, in place of the image's tokens.

    The result is as long as the prompt, so its first n tokens stand for the first n tokens of the prompt.
    """
    if not images:
        return prompt
    whole = bytearray(prompt)
    for image in images:
        begin, size = 4 * image.start, 4 * image.tokens
        whole[begin : begin + size] = (image.digest * (size // len(image.digest) + 1))[:size]
    return bytes(whole)


# Limits on the images of a request, which frontends enforce and workers check.

MAX_PIXEL_BYTES = 48 << 20  # all resized images of a request; a message has at most 64 MiB
MAX_PATCHES = 1 << 14  # patches of one image

"""Makes a data: URL, as in requests, of a picture's file."""

import base64
from pathlib import Path

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

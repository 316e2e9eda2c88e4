"""Turns pictures in a Python caller's conversations (Pillow images, paths) into the parts that the HTTP API takes."""

import io
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from frontend.errors import BadRequest
from shared.pictures.data_url import data_url, file_as_url

KINDS = ("image", "image_pil")  # types of parts with a picture, which is in the field of the same name
MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # Pillow's modes of the images that a PNG can hold


def with_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose pictures are data: URLs. Raises BadRequest for a picture that cannot be read."""
    content = message.get("content")
    parts = [_with_url(part) for part in content] if isinstance(content, list | tuple) else content
    return {**message, "content": parts}


def _with_url(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in KINDS or part.get(kind) is None:
        return part
    picture = part[kind]
    try:
        url = file_as_url(Path(picture)) if isinstance(picture, str | PathLike) else _encoded(picture)
    except ValueError as error:
        name = str(picture) if isinstance(picture, str | PathLike) else "a picture"
        raise BadRequest(f"`messages`: {name} {error}", param="messages", code="invalid_image") from error
    return {"type": "image_url", "image_url": {"url": url}}


def _encoded(image: Any) -> str:
    """Returns a Pillow image as a data: URL of a PNG, lossless and with its EXIF orientation."""
    if not (hasattr(image, "save") and hasattr(image, "convert")):
        raise ValueError(f"is a {type(image).__name__}, neither an image of Pillow nor a path")
    file, exif = io.BytesIO(), image.getexif()
    fitting = image if image.mode in MODES else image.convert("RGB")
    fitting.save(file, "PNG", compress_level=1, **({"exif": exif} if exif else {}))
    return data_url(file.getvalue())

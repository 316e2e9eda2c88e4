"""Compares the base model that an adapter's config names with the model that is served."""

import json
import re
from collections.abc import Iterable

from shared.adapters.files import AdapterFiles

KEY = "base_model_name_or_path"
MAX_CHARS = 200  # a longer name is shown only up to here
FORMAT = re.compile(r"[-_.](?:awq|gptq|bnb|fp8|nvfp4|mxfp4|gguf|mlx|int[48]|[48]bit|w\d|q\d).*")


def base_of(files: AdapterFiles) -> str:
    """Returns the name of the base that the adapter was made for; empty if its config names none."""
    try:
        config = json.loads(files.config or b"{}")
    except ValueError:
        return ""
    found = config.get(KEY) if isinstance(config, dict) else None
    return "".join(letter for letter in found if letter.isprintable())[:MAX_CHARS] if isinstance(found, str) else ""


def other_base(base: str, served: Iterable[str]) -> bool:
    """Returns whether `base` is clearly another model than the served one, whose names and path are `served`.

    Only names of the form OWNER/MODEL say anything: folders have any names. Owners are left out, because many publish
    the same weights, and so are formats, such as AWQ. Names of which one begins with the other may be one model, too.
    """
    if base.startswith(("/", ".", "~")) or base.count("/") != 1:
        return False
    name = _last(base)
    others = [_last(one) for one in served if one]
    return bool(name) and not any(one.startswith(name) or name.startswith(one) for one in others if one)


def _last(name: str) -> str:
    return FORMAT.sub("", name.rstrip("/").rpartition("/")[2].lower())

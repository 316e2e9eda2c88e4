"""The sampling that a checkpoint recommends for requests that say nothing."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from frontend.api.requests.decoding import reader, refuse_unknown
from frontend.api.requests.request_model import fields_of
from frontend.api.requests.request_types import OpenAIFields
from frontend.errors import SluiceError

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a checkpoint may recommend


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling fields that a checkpoint's generation_config.json recommends; none if it says not to sample.

    A value that no request could have is ignored.
    """
    if generation.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name in RECOMMENDED:
        with suppress(SluiceError):
            if (value := generation.get(name)) is not None:
                found[name] = reader(fields_of(OpenAIFields)[name].type)(value, name, refuse_unknown)
    return found

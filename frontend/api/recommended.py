"""The sampling parameters that a checkpoint recommends, as defaults of requests."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from frontend.api.requests.decoding import reader, refuse_unknown
from frontend.api.requests.request_model import fields_of
from frontend.api.requests.request_types import OpenAIFields
from frontend.errors import SluiceError

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # other recommendations are ignored


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters in a checkpoint's generation_config.json; none if it turns sampling off.

    A value that a request could not have is ignored.
    """
    if generation.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name in RECOMMENDED:
        with suppress(SluiceError):
            if (value := generation.get(name)) is not None:
                found[name] = reader(fields_of(OpenAIFields)[name].type)(value, name, refuse_unknown)
    return found

"""Requests as Python values, read as a body of JSON would be."""

from collections.abc import Mapping
from typing import Any

from frontend.api.common import ModelContext
from frontend.api.decoding import convert
from frontend.request import GenerationRequest


async def parse(api_format: Any, body: Mapping[str, Any], context: ModelContext) -> GenerationRequest:
    request: GenerationRequest = await api_format.parse(convert(body, api_format.REQUEST), context)
    return request

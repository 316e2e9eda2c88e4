"""The request and response types of the routes that load and unload models, with the names of llama.cpp's router."""

from typing import Annotated

from msgspec import Meta

from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import doc
from frontend.api.requests.response_types import ResponseModel
from shared.models.entries import MOST_NAME_CHARS


class ModelRequest(RequestModel):
    model: Annotated[str, Meta(min_length=1, max_length=MOST_NAME_CHARS), doc("The name of the model")]


class Sleeping(ResponseModel):
    is_sleeping: bool

"""The parts of a message of OpenAI's chat: texts and pictures."""

from typing import Annotated, Literal

from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Ignored, doc
from frontend.text.picture_marks import Source


class _Part(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"


class TextPart(_Part, tag="text"):
    text: str
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class ImageURL(RequestModel):
    url: Annotated[str, doc("A data: URL in base64; http(s): and file: as far as the server allows it")]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, doc("low: a picture is not cut into tiles")
    ] = None


class ImagePart(_Part, tag="image_url"):
    image_url: ImageURL

    @property
    def source(self) -> Source:
        return Source(self.image_url.url, self.image_url.detail or "auto")

    @property
    def text(self) -> str:
        """The text that stands for the picture in the message."""
        return self.source.mark

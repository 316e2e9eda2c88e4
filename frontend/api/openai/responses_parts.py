"""The parts of a message or of a tool's result in OpenAI's Responses API: texts, pictures and refusals."""

from typing import Annotated, Literal

from frontend.api.openai.content_parts import RefusalPart
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Ignored, Refused, doc
from frontend.text.picture_marks import Source


class _ContentPart(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"


class ResultPart(_ContentPart, tag="input_text"):
    text: str
    prompt_cache_breakpoint: Ignored = None
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class OutputPart(_ContentPart, tag="output_text"):
    text: str
    prompt_cache_breakpoint: Ignored = None
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class ImagePart(_ContentPart, tag="input_image"):
    image_url: Annotated[str, doc("A data: URL in base64; http(s): and file: if the server allows them")]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, doc("low: a picture is not cut into tiles")
    ] = None
    file_id: Refused = None
    prompt_cache_breakpoint: Ignored = None

    @property
    def source(self) -> Source:
        return Source(self.image_url, self.detail or "auto")

    @property
    def text(self) -> str:
        """The text that stands for the picture in the message."""
        return self.source.mark


Part = ResultPart | OutputPart | ImagePart | RefusalPart

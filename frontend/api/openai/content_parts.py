"""The parts of a message of OpenAI's chat: texts, pictures, and an assistant's reasoning and refusals.

Clients of other servers send parts without `type`, and texts as plain strings. These forms are accepted, too.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.chat.chat_prompt import MAX_PARTS
from frontend.api.requests.request_model import FieldError, RequestModel
from frontend.api.requests.request_types import Ignored, doc
from frontend.errors import BadRequest
from frontend.text.picture_marks import Source


class _Part(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"


class TextPart(_Part, tag="text"):
    KNOWN_BY: ClassVar = "text"
    FROM_TEXT: ClassVar = "text"

    text: str
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class InputTextPart(TextPart, tag="input_text"):
    """A text part under the name that it has in the Responses API. Chats accept it, too, as in vLLM."""

    KNOWN_BY: ClassVar = ""
    FROM_TEXT: ClassVar = ""


class OutputTextPart(InputTextPart, tag="output_text"):
    annotations: Ignored = None
    logprobs: Ignored = None


class ImageURL(RequestModel):
    FROM_TEXT: ClassVar = "url"

    url: Annotated[str, doc("A data: URL in base64; http(s): and file: if the server allows them")]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, doc("low: a picture is not cut into tiles")
    ] = None


class ImagePart(_Part, tag="image_url"):
    KNOWN_BY: ClassVar = "image_url"

    image_url: ImageURL
    prompt_cache_breakpoint: Ignored = None
    cache_control: Ignored = None
    uuid: Ignored = None  # vLLM's cache key for the picture

    @property
    def source(self) -> Source:
        return Source(self.image_url.url, self.image_url.detail or "auto")

    @property
    def text(self) -> str:
        """The text that stands for the picture in the message."""
        return self.source.mark


class InputImagePart(ImagePart, tag="input_image"):
    """A picture in the form of the Responses API, with `detail` beside the URL."""

    KNOWN_BY: ClassVar = ""

    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def source(self) -> Source:
        return Source(self.image_url.url, self.detail or self.image_url.detail or "auto")


class RefusalPart(_Part, tag="refusal"):
    """An assistant's refusal to answer. The model sees it as an ordinary text."""

    KNOWN_BY: ClassVar = "refusal"

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(_Part, tag="thinking"):
    """An assistant's reasoning: a string from vLLM's clients, text parts from Mistral's clients."""

    thinking: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]
    closed: Ignored = None
    signature: Ignored = None
    text: ClassVar = ""

    @property
    def thought(self) -> str:
        if isinstance(self.thinking, str):
            return self.thinking
        return "".join([part.text for part in self.thinking])  # the pieces of a stream, not texts of their own


class ReasoningPart(_Part, tag="reasoning"):
    """An assistant's reasoning: in `reasoning` from LangChain, in `text` from Vercel's AI SDK."""

    SCHEMA: ClassVar = (
        {"anyOf": [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("reasoning", "text")]},
    )

    reasoning: str | None = None
    spoken: str | None = msgspec.field(name="text", default=None)
    text: ClassVar = ""

    def __post_init__(self) -> None:
        if self.reasoning is None and self.spoken is None:
            raise FieldError("reasoning", "is missing", BadRequest, "missing_field")

    @property
    def thought(self) -> str:
        return self.reasoning or self.spoken or ""


Texts = TextPart | InputTextPart | OutputTextPart
Part = Texts | ImagePart | InputImagePart | RefusalPart | ThinkingPart | ReasoningPart
Content = str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)]


def thoughts_in(content: Content | None) -> str | None:
    """Returns the text of the reasoning parts of a message; None if it has no such parts."""
    if content is None or isinstance(content, str):
        return None
    thoughts = [part.thought for part in content if isinstance(part, ThinkingPart | ReasoningPart)]
    return "\n".join(thoughts) if thoughts else None

"""The prompt of a conversation with pictures (frontend/pictures). Imported only for such a conversation."""

from frontend.api.chat.chat_prompt import Prompt, Rendered, checked_ids
from frontend.api.model_context import ModelContext
from frontend.errors import BadRequest
from frontend.pictures.prompt import pictures_of, placed, shown_text
from frontend.text.picture_format import PictureFormat


async def with_pictures(rendered: Rendered, context: ModelContext, param: str) -> Prompt:
    """Reads and decodes the pictures, and puts them into the prompt. Raises BadRequest or Unprocessable."""
    seen = context.tokenizer.pictures
    assert seen is not None
    pictures = await pictures_of(rendered.pictures, seen, context.config)
    text = shown_text(rendered.marked, rendered.mark, pictures, seen, param)
    ids = await checked_ids(text, rendered.mark, context, param)
    return Prompt(ids, rendered.begins, placed(ids, pictures, seen, context.tokenizer, param))


def check_sight(context: ModelContext, param: str) -> PictureFormat:
    """Raises BadRequest for a model that accepts no pictures, or whose chat template shows none.

    param: where the request has its first picture
    """
    if (seen := context.tokenizer.pictures) is None:
        raise BadRequest(
            f"`{param}`: the model `{context.model}` sees no images, only text", param=param,
            code="unsupported_content",
        )  # fmt: skip
    if not context.template.takes_parts:
        raise BadRequest(
            f"`{param}`: the model's chat template shows no images", param=param, code="unsupported_content"
        )
    return seen

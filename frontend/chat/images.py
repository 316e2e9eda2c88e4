"""Puts images into a prompt: writes their tokens into its text, and finds the places of these tokens in its ids."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from frontend.chat.image_decoding import Decoded, decoded, key_of, recent_images
from frontend.chat.image_sources import read
from frontend.chat.prompt import Prompt, Rendered, checked_ids
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext
from frontend.text.chat_template import Source
from frontend.text.image_format import ImageFormat
from frontend.text.tokenizer import Tokenizer
from shared.config.frontend import FrontendConfig
from shared.images import MAX_PIXEL_BYTES
from shared.messages import PromptImage


async def decoded_images(
    sources: Sequence[Source], seen: ImageFormat, config: FrontendConfig, found: dict[str, Decoded] | None = None
) -> list[Decoded]:
    """Reads and decodes all images of a request. Raises BadRequest for the first one that cannot be used.

    found: images of this request that were read before, by their marks; gets those that are read now
    """
    most = config.max_images_per_request
    if len(sources) > most:
        raise BadRequest(
            f"`{sources[most].path}`: the request has {len(sources)} images; at most {most} are accepted "
            "(--max-images-per-request)", param=sources[most].path, code="too_many_images",
        )  # fmt: skip
    found = {} if found is None else found
    recent, total = recent_images(), 0
    for source in sources:
        path, mark = source.path, source.mark
        if mark not in found:
            cut = replace(seen, cuts=False) if source.detail == "low" else seen
            data, pixels = await read(source, config), config.max_image_pixels
            key = key_of(data, cut, pixels)
            found[mark] = recent.get(key) or await decoded(path, data, cut, pixels)
            recent.add(key, found[mark])
        total += found[mark].nbytes
        if total > MAX_PIXEL_BYTES:
            raise BadRequest(
                f"`{path}`: with this image, the images have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels",
                param=path, code="too_many_images",
            )  # fmt: skip
    return [found[source.mark] for source in sources]


def shown_text(text: str, mark: str, images: Sequence[Decoded], seen: ImageFormat, param: str) -> str:
    """Returns the rendered conversation, with the tokens of an image in place of each placeholder.

    mark: stands before placeholders that a client has written (frontend/chat/prompt.py); these are not replaced.
    param: the request field that holds the conversation
    Raises Unprocessable unless the template shows each image once.
    """
    own = re.compile((f"(?<!{re.escape(mark)})" if mark else "") + re.escape(seen.placeholder))
    if (count := len(own.findall(text))) != len(images):
        raise Unprocessable(
            f"`{param}` has {len(images)} images, but the model's chat template shows {count} of them",
            param=param, code="unsupported_content",
        )  # fmt: skip
    following = iter(images)

    def shown(_: re.Match[str]) -> str:
        one = next(following)
        return seen.shown(one.rows, one.columns, [(height, width) for height, width, _ in one.tiles])

    return own.sub(shown, text)


def placed(
    ids: Sequence[int], images: Sequence[Decoded], seen: ImageFormat, tokenizer: Tokenizer, param: str
) -> tuple[PromptImage, ...]:
    """Returns the tiles of all images, each with the place of its tokens in the prompt.

    Raises Unprocessable if the tokenizer does not encode these tokens as one id each.
    """
    placeholder = tokenizer.ids_of({seen.token: ""})
    tiles = [tile for one in images for tile in one.tiles]
    digests = [digest for one in images for digest in one.digests]
    row_end = tokenizer.ids_of({seen.row_end: ""}) if seen.row_end else ()
    places = [place for place, id in enumerate(ids) if id in placeholder or id in row_end]
    counts = [seen.tokens_of(height, width) for height, width, _ in tiles]
    starts = [places[before] for before in accumulate(counts, initial=0) if before < len(places)]
    if len(places) != sum(counts) or any(
        places[before + count - 1] != start + count - 1
        for before, start, count in zip(accumulate(counts, initial=0), starts, counts, strict=False)
    ):
        raise Unprocessable(
            f"`{param}`: the tokenizer does not make a token of each {seen.token}, so the model cannot see images",
            param=param, code="unsupported_content",
        )  # fmt: skip
    return tuple(
        PromptImage(start, count, height, width, pixels, digest)
        for start, count, (height, width, pixels), digest in zip(starts, counts, tiles, digests, strict=True)
    )


# The prompt of a conversation with images (frontend/chat). Imported only for such a conversation.


async def prompt_with_images(
    rendered: Rendered, context: ModelContext, param: str, found: dict[str, Decoded] | None = None
) -> Prompt:
    """Reads and decodes the images, and puts them into the prompt. Raises BadRequest or Unprocessable.

    found: see `decoded_images`
    """
    seen = context.tokenizer.image_format
    assert seen is not None
    images = await decoded_images(rendered.image_sources, seen, context.config, found)
    text = shown_text(rendered.marked, rendered.mark, images, seen, param)
    (ids,) = await checked_ids([text], rendered.mark, context, param)
    return Prompt(ids, rendered.begins, placed(ids, images, seen, context.tokenizer, param))


def check_supports_vision(context: ModelContext, param: str) -> ImageFormat:
    """Raises BadRequest for a model that accepts no images, or whose chat template shows none.

    param: where the request has its first image
    """
    if (seen := context.tokenizer.image_format) is None:
        raise BadRequest(
            f"`{param}`: the model `{context.model}` sees no images, only text", param=param,
            code="unsupported_content",
        )  # fmt: skip
    if not context.template.takes_parts:
        raise BadRequest(
            f"`{param}`: the model's chat template shows no images", param=param, code="unsupported_content"
        )
    return seen

"""A picture of a prompt, ready for a vision encoder."""

import msgspec


class Picture(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One input of the vision encoder: a picture, or one tile of it."""

    start: int  # index of the picture's first placeholder token in the prompt
    tokens: int  # number of placeholder tokens of the picture, which have no gap between them
    height: int  # in pixels, after resizing: the size that the encoder sees
    width: int
    pixels: bytes  # uint8 RGB, height x width x 3, row by row
    digest: bytes  # sha256 over (height, width, pixels): 32 bytes

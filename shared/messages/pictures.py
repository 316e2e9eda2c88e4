"""A picture of a prompt, ready for a vision encoder."""

import msgspec


class Picture(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One input of the vision encoder: a picture, or one tile of it."""

    start: int  # index in the prompt of its first placeholder token
    tokens: int  # how many placeholder tokens it fills, a run without gaps
    height: int  # of the pixels, already resized: what the encoder sees
    width: int
    pixels: bytes  # uint8 RGB, height x width x 3, row by row
    digest: bytes  # sha256 over (height, width, pixels): 32 bytes

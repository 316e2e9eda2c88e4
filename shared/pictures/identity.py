"""Makes prompts with pictures comparable. All pictures have the same placeholders, so digests replace them."""

from collections.abc import Sequence

from shared.messages import Picture


def with_digests(prompt: bytes, pictures: Sequence[Picture]) -> bytes:
    """Returns a packed prompt with the digest of each picture, repeated, in place of the picture's tokens.

    The result is as long as the prompt, so its first n tokens stand for the first n tokens of the prompt.
    """
    if not pictures:
        return prompt
    whole = bytearray(prompt)
    for picture in pictures:
        begin, size = 4 * picture.start, 4 * picture.tokens
        whole[begin : begin + size] = (picture.digest * (size // len(picture.digest) + 1))[:size]
    return bytes(whole)

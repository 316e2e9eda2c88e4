"""Says what is wrong with a request body that is not JSON. Knows no field."""

import re

from frontend.errors import BadRequest

# A high surrogate's escape without a low one behind it. The backslash before `u` must not be escaped itself.
HALF_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})")


def not_json(exc: Exception, body: bytes) -> BadRequest:
    """Returns the error for a body that msgspec could not decode for the reason `exc`.

    msgspec counts the position of a byte that is no UTF-8 from the start of its string, and takes half a character for
    the end of the body.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}")
    if half := HALF_CHARACTER.search(body):
        return BadRequest(
            f"the body has half of a character, `{half[1].decode()}` at byte {half.start(1)}: "
            "the text was cut between the two escapes that stand for one character"
        )
    return BadRequest(f"the body is not JSON: {exc}")

"""Explains why a request body is not JSON. Knows no field."""

import re

from frontend.errors import BadRequest

# The escape of a high surrogate that no escape of a low surrogate follows. The backslash before `u` must not be
# escaped.
HALF_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})")


def not_json(exc: Exception, body: bytes) -> BadRequest:
    """Returns the error for a body that msgspec could not decode. exc: msgspec's error

    Two cases get their own message. For invalid UTF-8, msgspec counts the position from the start of the string, not of
    the body. For half a surrogate pair, it reports that the body is truncated.
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

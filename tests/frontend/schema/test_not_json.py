"""The error for a body that is not JSON names the place of a wrong byte, or of half a character."""

import pytest

from frontend.errors import BadRequest
from frontend.schema.decoding import decode_json


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": "xx", "b": "\xc3("}', r"not UTF-8: invalid continuation byte at byte 18"),
        (b'{"a": "\\ud83d"}', r"half of a character, `\\ud83d` at byte 7"),
        (b'{"a": "\\ud83d\\ude00 \\uD83D and more"}', r"half of a character, `\\uD83D` at byte 20"),
        (b'{"a": "\\\\\\ud83d"}', r"half of a character, `\\ud83d` at byte 9"),
        (b'{"a": "\\\\ud83d"', r"not JSON: .*truncated"),  # an escaped backslash and letters, so no surrogate
        (b'{"a": "\\ud83d\\ude00"', r"not JSON: .*truncated"),
        (b'{"a": 1,}', r"not JSON: .*trailing comma"),
        (b"", r"^the body is empty"),
        (b" \n", r"^the body is empty"),
        pytest.param(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", r"^the body is nested too deeply", id="deep"),
        pytest.param(
            b'{"a": ' + b"9" * 5000 + b"}", r"^the body has a number that is too large, `9{20}` at byte 6$", id="digits"
        ),
        (b'{"1e998": "\\"1e999", "a": [-2.5, -1.5E+999]}', r"too large, `-1.5E\+999` at byte 33$"),
    ],
)
def test_error_names_what_is_wrong_and_where(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        decode_json(body)


def test_many_backslashes_take_no_time() -> None:
    with pytest.raises(BadRequest, match="truncated"):
        decode_json(b'{"a": "' + b"\\\\" * 200_000)

"""JSON of responses."""

import json

import pytest

from frontend.api.requests.encoding import to_json


@pytest.mark.parametrize(
    "text", ["a\u2028b\u2029\u0085", "\x0b\x0c\x1c\x1d\x1e\r\n", "é\u0084\u2027\u202a日本 😀\\u2028", ""]
)
def test_json_is_one_line_to_every_reader_of_lines(text: str) -> None:
    encoded = to_json({"text": text, text: [text]})
    assert json.loads(encoded) == {"text": text, text: [text]}
    assert len(encoded.decode().splitlines()) == 1
    assert to_json("日本") == '"日本"'.encode()

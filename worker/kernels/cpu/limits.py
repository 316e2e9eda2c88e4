"""The limits of the C library's fixed-size arrays. They are read from csrc/model_limits.h, so C and Python agree."""

import re
from pathlib import Path

_HEADER = Path(__file__).with_name("csrc") / "model_limits.h"
_NUMBERS = {
    name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)", _HEADER.read_text(), re.MULTILINE)
}

MAX_HEAD_DIM = _NUMBERS["MAX_HEAD_DIM"]  # elements of an attention head
MAX_KEY_ELEMENTS = _NUMBERS["MAX_KEY_ELEMENTS"]  # elements of all key heads of a token in one layer
MAX_TAPS = _NUMBERS["MAX_TAPS"]  # tokens that a convolution covers
MAX_CHOSEN = _NUMBERS["MAX_CHOSEN"]  # experts that are chosen for a row

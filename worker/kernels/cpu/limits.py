"""The bounds of the C library's fixed arrays, read from csrc/model_limits.h: both sides have the same numbers."""

import re
from pathlib import Path

_HEADER = Path(__file__).with_name("csrc") / "model_limits.h"
_NUMBERS = {
    name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)", _HEADER.read_text(), re.MULTILINE)
}

MAX_HEAD_DIM = _NUMBERS["MAX_HEAD_DIM"]  # elements of a head, of attention
MAX_KEY_ELEMENTS = _NUMBERS["MAX_KEY_ELEMENTS"]  # elements of all keys of a token in a layer
MAX_TAPS = _NUMBERS["MAX_TAPS"]  # inputs of a convolution
MAX_CHOSEN = _NUMBERS["MAX_CHOSEN"]  # experts of a row

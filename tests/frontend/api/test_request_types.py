"""The fields that API formats share: what they accept, what they refuse, and with which status."""

from typing import Any

import pytest

from frontend.api.decoding import convert
from frontend.api.openai.completions_input import CompletionRequest
from frontend.errors import BadRequest, Unprocessable

LEAST = {"model": "m", "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(("field", "value"), [
    ("seed", -(1 << 63)), ("seed", (1 << 64) - 1), ("priority", -(1 << 31)), ("top_k", 8.0), ("temperature", 0),
    ("logit_bias", {"5": 1}), ("stop", "x"), ("stop", ["x", "y"]), ("user", {"any": 1}), ("skip_special_tokens", True),
    ("allowed_token_ids", None), ("length_penalty", 1), ("use_beam_search", False),
])  # fmt: skip
def test_shared_field_accepts_its_values(field: str, value: Any) -> None:
    convert({**LEAST, field: value}, CompletionRequest)


@pytest.mark.parametrize(("field", "value", "code"), [
    ("seed", 1 << 64, "out_of_range"), ("top_p", 0, "out_of_range"), ("min_p", 1.1, "out_of_range"),
    ("repetition_penalty", 0, "out_of_range"), ("logit_bias", {"a": 1}, "out_of_range"), ("stop", [""], "out_of_range"),
    ("stream_reasoning", False, "unsupported_field"), ("allowed_token_ids", [-1], "out_of_range"),
    ("nonsense", 1, "unknown_field"),
])  # fmt: skip
def test_shared_field_out_of_range_or_unsupported_is_unprocessable(field: str, value: Any, code: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        convert({**LEAST, field: value}, CompletionRequest)
    assert (refused.value.param, refused.value.code, refused.value.status) == (field, code, 422)


@pytest.mark.parametrize(("field", "value"), [("seed", "1"), ("top_k", 8.5), ("stop", 1), ("logit_bias", [1])])
def test_shared_field_of_a_wrong_type_is_a_bad_request(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        convert({**LEAST, field: value}, CompletionRequest)
    assert (refused.value.param, refused.value.code, refused.value.status) == (field, "wrong_type", 400)


def test_stop_of_one_text_is_the_same_as_a_list_of_it() -> None:
    assert convert({**LEAST, "stop": "x"}, CompletionRequest).stops == ("x",)
    assert convert(LEAST, CompletionRequest).stops == ()

"""The decoder refuses a list that is too long by its length, before it makes any of its elements."""

from typing import Any

import msgspec
import pytest

from shared.messages import SamplerChain, Sampling, Submit
from shared.messages.requests import MAX_FEW_IDS, MAX_LIST_IDS
from shared.wire import decode_request, encode


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"logit_bias": ((1, 1.0),)}, MAX_LIST_IDS), ({"allowed_token_ids": (1,)}, MAX_LIST_IDS),
        ({"stop_token_ids": (1,)}, MAX_FEW_IDS), ({"bad_words": ((1,),)}, MAX_FEW_IDS),
    ],
)  # fmt: skip
def test_longer_lists_are_refused(fields: dict[str, Any], most: int) -> None:
    (name, one), *_ = fields.items()
    wrong: Any = ("x",)  # an element would be refused itself, if it were made before the length is looked at
    body = encode(Submit(1, bytes(4), Sampling(1, **{name: wrong * (most + 1)})))
    with pytest.raises(msgspec.DecodeError, match=f"length <= {most}"):
        decode_request(body)
    assert isinstance(decode_request(encode(Submit(1, bytes(4), Sampling(1, **{name: one * 9})))), Submit)


def test_chain_of_samplers_and_its_breakers_are_bounded() -> None:
    body = encode(Submit(1, bytes(4), Sampling(1, chain=SamplerChain(("typ_p",) * (MAX_FEW_IDS + 1)))))
    with pytest.raises(msgspec.DecodeError):
        decode_request(body)

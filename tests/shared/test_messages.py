"""Tests of shared/messages/."""

import msgspec
import pytest

from shared import messages as m
from shared.wire import encode


def test_messages_are_tagged_arrays_that_older_peers_may_send_without_the_last_fields() -> None:
    short = msgspec.msgpack.encode(["Submit", 1, b"", [5]])
    decoded = msgspec.msgpack.decode(short, type=m.Request)
    assert decoded == m.Submit(1, b"", m.Sampling(5))
    assert msgspec.msgpack.decode(encode(m.Abort((1,)))) == ["Abort", [1]]


@pytest.mark.parametrize(
    ("sampling", "penalized"),
    [
        (m.Sampling(1), False),
        (m.Sampling(1, repetition_penalty=1.1), True),
        (m.Sampling(1, presence_penalty=-0.5), True),
        (m.Sampling(1, frequency_penalty=0.5), True),
    ],
)
def test_sampling_knows_whether_it_penalizes(sampling: m.Sampling, penalized: bool) -> None:
    assert sampling.penalized is penalized

"""shared/wire.py. tests/wire/test_hostile.py has hostile frames."""

import msgspec
import pytest

from shared import messages as m
from shared.wire import decode_event, decode_request, encode, pack_f32, pack_u32, unpack_f32, unpack_u32


@pytest.mark.parametrize("request_", [m.Hello(1, 2), m.Lease(1, 2, pack_u32([2])), m.Abort((1, 2)), m.Resync(1, 5)])
def test_requests_survive_encoding(request_: m.Request) -> None:
    assert decode_request(encode(request_)) == request_


def test_status_survives_encoding_with_its_state() -> None:
    status = m.Status(1, 2, "m", "cpu", "float32", m.WorkerState.DRAINING)
    decoded = decode_event(encode(status))
    assert decoded == status and isinstance(decoded, m.Status) and decoded.state is m.WorkerState.DRAINING


def test_event_is_no_request() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(encode(m.Step(1, 0)))


def test_columns_survive_packing() -> None:
    assert list(unpack_u32(pack_u32([0, 1, 2**32 - 1]))) == [0, 1, 2**32 - 1]
    assert list(unpack_f32(pack_f32([0.5, -2.0]))) == [0.5, -2.0]
    assert pack_u32([1]) == b"\x01\0\0\0"


def test_columns_reject_what_does_not_fit() -> None:
    with pytest.raises(OverflowError):
        pack_u32([2**32])
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"abc")

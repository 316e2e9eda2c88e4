"""Encodes and decodes messages: one encoder, two typed decoders, packed columns. It never uses pickle.

An event frame has two parts: topic (the frontend's id or BROADCAST) and body. A request frame has only a body, to which
the ROUTER adds the sender. Decoders raise `msgspec.DecodeError` (its subclass ValidationError for the wrong shape).
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

from shared.messages import Event, Request

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

encode = _encoder.encode


def decode_request(body: bytes | memoryview) -> Request:
    try:
        return _requests.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:  # text that is not UTF-8; very deep nesting
        raise msgspec.DecodeError(str(error)) from None


def decode_event(body: bytes | memoryview) -> Event:
    try:
        return _events.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def pack_u32(values: Iterable[int]) -> bytes:
    """Packs values as little-endian uint32; raises OverflowError for a value beyond 32 bits."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(data: bytes) -> "array[int]":
    """Reverses pack_u32; raises ValueError when `data` is not a whole number of values."""
    return _unpack("I", data)


def pack_f32(values: Iterable[float]) -> bytes:
    return _little_endian(array("f", values)).tobytes()


def unpack_f32(data: bytes) -> "array[float]":
    return _unpack("f", data)


def _unpack(typecode: str, data: bytes) -> array:  # type: ignore[type-arg]
    values = array(typecode)
    values.frombytes(data)
    return _little_endian(values)


def _little_endian(values: array) -> array:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values.byteswap()
    return values

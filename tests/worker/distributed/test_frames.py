"""Frames from rank 0 arrive unchanged at the other ranks."""

import socket
import threading
from dataclasses import fields, replace

import msgspec
import pytest
import torch

from tests.worker.models.harness import Row as Sequence
from tests.worker.models.harness import pack
from worker.distributed.messages import BOTH, LOGITS, Order, inputs_of, order, receive, rows_of, send
from worker.models.forward_inputs import ForwardInputs


def through_socket(frame: Order) -> Order:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, frame))  # a frame may be longer than the socket's buffer
        sender.start()
        data = receive(theirs)
        sender.join()
    return msgspec.msgpack.decode(data, type=Order)


@pytest.mark.parametrize("length", [1, 300, 100_000])
def test_inputs_of_a_step_arrive_as_they_were(length: int) -> None:
    rows = [Sequence(list(range(length)), list(range(1, 2 + length // 16))), Sequence([5, 6], [7])]
    count = length + 2
    images = {
        "bidirectional_end": torch.arange(count, dtype=torch.int32), "rotary": torch.arange(2 * count).view(count, 2),
        "rope_rows": torch.arange(count), "replaced": (torch.tensor([0]), torch.randn(1, 8).bfloat16()),
    }  # fmt: skip
    inputs = replace(pack([(row, len(row.tokens)) for row in rows], 16), **images)
    found = through_socket(order(BOTH, inputs))
    arrived = inputs_of(found, torch.empty(1, 8))
    assert found.compute == BOTH
    for field in fields(ForwardInputs):
        sent, got = getattr(inputs, field.name), getattr(arrived, field.name)
        for one, other in zip(sent, got, strict=True) if isinstance(sent, tuple) else [(sent, got)]:
            same = torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(one) else one == other
            assert same, field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_of_the_head_arrive_as_they_were(dtype: torch.dtype, rows: int) -> None:
    h = torch.randn(1, 24).to(dtype).expand(rows, 24)  # all rows share memory
    arrived = rows_of(through_socket(order(LOGITS, h)))
    assert torch.equal(arrived, h) and arrived.dtype == dtype and arrived.shape == h.shape


def test_end_of_the_other_side_is_an_end_of_file() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x08\0\0\0\0\0\0\0half")
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive(theirs)

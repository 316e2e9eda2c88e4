"""The messages between rank 0 and the other ranks, as bytes: the settings at start, and the inputs of each step.

Both ends run the same version of this program: on one machine, or on hosts that have compared their versions (hosts/).
"""

import errno
import socket
import struct
from dataclasses import fields
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.config import ModelConfig, WorkerConfig
from worker.kv_cache.sizing import PoolSize
from worker.model.inputs.forward_inputs import ForwardInputs

CPU = torch.device("cpu")
HIDDEN, LOGITS, BOTH = "hidden", "logits", "both"  # values of Order.compute
FIELDS = [field.name for field in fields(ForwardInputs)]
LENGTH = struct.Struct("<Q")
IN_C, ON_GPUS = "c", "gpus"  # values of Beginning.exchange
RECEIVED = 1 << 20  # the maximum bytes of one recv()
MOST_BYTES = 1 << 30  # the maximum bytes of a frame


class Beginning(msgspec.Struct, frozen=True):
    """The first frame to a rank: the model, and the part of it to load.

    memory: bytes of the memory that all ranks of a stage share; on GPUs, the ranks find each other in this memory
    rows: the file descriptors of the connections to ranks of other stages, by rank
    exchange: how ranks exchange columns: IN_C, or ON_GPUS
    """

    model: ModelConfig
    worker: WorkerConfig
    rank: int
    memory: int
    rows: dict[int, int] = {}
    exchange: str = IN_C


class Sizes(msgspec.Struct, frozen=True):
    """The second frame to a rank, sent when rank 0 has loaded its part: the sizes of the pools."""

    size: PoolSize


class Joining(msgspec.Struct, frozen=True, tag=True):
    """Sent by a rank on a GPU when it has loaded its weights, and is ready to join the ranks with the same layers."""


class Join(msgspec.Struct, frozen=True):
    """The answer to Joining, sent to all ranks when all are ready: ranks that join wait for each other only briefly."""


class Free(msgspec.Struct, frozen=True, tag=True):
    """Sent by a rank when it has loaded its weights. nbytes: memory that is left for the rank on its machine or GPU

    Ranks on the machine of rank 0 send it only on GPUs, or if there are several stages, which do not load in the same
    time. kernels, invariant: what the rank's checks of its GPU have found.
    """

    nbytes: int
    kernels: str = ""
    invariant: bool = True


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Sent by a rank when it has loaded its part of the model, or cannot load it.

    own, of_next: checksums of its own slices and of the next rank's (checks.py), or empty. content: a hash of the
    weight files, if the rank reads its own files. problem: why it cannot load; empty if it is ready.
    """

    own: dict[str, int] = {}
    of_next: dict[str, int] = {}
    content: str = ""
    problem: str = ""


class TensorBytes(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Rows(msgspec.Struct, frozen=True):
    """What a stage of a pipeline hands to the next one."""

    rows: TensorBytes


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One frame for each step. columns: the fields of ForwardInputs; for LOGITS, the rows of the output head's input.

    checked: whether ranks compare their residual streams after this step.
    """

    compute: str
    columns: list[TensorBytes | list[TensorBytes | int] | int | None]
    checked: bool = False


def order(compute: str, inputs: ForwardInputs | Tensor, *, checked: bool = False) -> Order:
    if isinstance(inputs, Tensor):
        return Order(compute, [_bytes_of(inputs)])
    return Order(compute, [_packed(getattr(inputs, name)) for name in FIELDS], checked)


def inputs_of(given: Order, device: torch.device = CPU) -> ForwardInputs:
    columns = zip(FIELDS, given.columns, strict=True)
    return ForwardInputs(**{name: _unpacked(value, device) for name, value in columns})


def rows_of(given: Order, device: torch.device = CPU) -> Tensor:
    (rows,) = given.columns
    assert isinstance(rows, TensorBytes)
    return _tensor_of(rows).to(device)


def rows_frame(rows: Tensor) -> Rows:
    return Rows(_bytes_of(rows))


def rows_in(data: bytes) -> Tensor:
    return _tensor_of(msgspec.msgpack.decode(data, type=Rows).rows)


def send(to: socket.socket, frame: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(frame)
    to.sendall(LENGTH.pack(len(data)) + data)


def receive(source: socket.socket, most: int = MOST_BYTES) -> bytes:
    """Waits for a frame. Raises EOFError when the other side has closed, and OSError for more than `most` bytes."""
    (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
    if length > most:
        raise OSError(errno.EMSGSIZE, f"a frame of {length} bytes is more than {most}")
    return _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = source.recv(min(count - len(data), RECEIVED))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _bytes_of(value)
    return [_packed(one) for one in value] if isinstance(value, tuple) else value


def _unpacked(value: Any, device: torch.device) -> Any:
    if isinstance(value, TensorBytes):
        return _tensor_of(value).to(device)
    return tuple(_unpacked(one, device) for one in value) if isinstance(value, list) else value


def _bytes_of(tensor: Tensor) -> TensorBytes:
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy has no bfloat16
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), plain.cpu().numpy().tobytes())


def _tensor_of(packed: TensorBytes) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.data:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).view(packed.shape)

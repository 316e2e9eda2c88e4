"""The messages between rank 0 and the other ranks, as bytes: the settings at start, and the inputs of each step.

Both ends run the same version of this program: on one machine, or on hosts that have compared their versions
(rendezvous.py).
"""

import errno
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.kv_cache.sizing import PoolSize
from worker.models.forward_inputs import ForwardInputs

CPU = torch.device("cpu")
HIDDEN, LOGITS, BOTH = "hidden", "logits", "both"  # values of Order.compute
# the fields in Order.columns; of aux_hidden_states, an Order has only the layers
FIELDS = [field.name for field in fields(ForwardInputs) if field.name != "aux_hidden_states"]
LENGTH = struct.Struct("<Q")
IN_C, ON_GPUS = "c", "gpus"  # values of Beginning.exchange
RECEIVED = 1 << 20  # the maximum bytes of one recv()
MOST_BYTES = 1 << 30  # the maximum bytes of a frame


class Beginning(msgspec.Struct, frozen=True):
    """The first frame to a rank: the model, and the part of it to load.

    memory: bytes of the memory that all ranks of a stage share; on GPUs, the ranks find each other in this memory
    rows: the file descriptors of the connections to ranks of other stages, by rank
    exchange: how ranks exchange columns: IN_C, or ON_GPUS
    loads: the file descriptor of the counts of experts (pipeline.py); -1 without them
    """

    model: ModelConfig
    worker: WorkerConfig
    rank: int
    memory: int
    rows: dict[int, int] = {}
    exchange: str = IN_C
    loads: int = -1


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


class KeepWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent when the weights of all ranks have been compared: each rank may write its own to --weights-cache."""


class StepAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter of a step. number: see NewAdapter; rows: the indices of its rows among all rows of the step"""

    number: int
    scale: float
    rows: TensorBytes


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One frame for each step. columns: the fields of ForwardInputs; for LOGITS, the rows of the output head's input.

    checked: whether ranks compare their residual streams after this step
    aux_hidden_states: the layers in ForwardInputs.aux_hidden_states
    """

    compute: str
    columns: list[TensorBytes | list[TensorBytes | int] | bool | int | None]
    checked: bool = False
    adapters: list[StepAdapter] = []
    aux_hidden_states: list[int] = []


class NewAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Announces the files of a LoRA adapter (AdapterFiles). `nbytes` bytes of AdapterPiece follow, between orders.

    number: by which later frames name the adapter
    """

    number: int
    config: bytes | None
    nbytes: int


class AdapterPiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The next bytes of an adapter's weights."""

    number: int
    data: bytes


class AdapterGone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No later step uses the adapter."""

    number: int


AdapterFrame = NewAdapter | AdapterPiece | AdapterGone


def order(
    compute: str,
    inputs: ForwardInputs | Tensor,
    *,
    checked: bool = False,
    adapters: Sequence[tuple[int, float, Tensor]] = (),
) -> Order:
    """adapters: number, scale and rows of each StepAdapter"""
    if isinstance(inputs, Tensor):
        return Order(compute, [_bytes_of(inputs)])
    used = [StepAdapter(number, scale, _bytes_of(rows)) for number, scale, rows in adapters]
    columns, aux_hidden_states = (
        [_packed(getattr(inputs, name)) for name in FIELDS],
        [layer for layer, _ in inputs.aux_hidden_states],
    )
    return Order(compute, columns, checked, used, aux_hidden_states)


def inputs_of(given: Order, like: Tensor) -> ForwardInputs:
    """Returns the inputs of a step on the device of `like`, a tensor [..., H] with the dtype of the residual stream."""
    columns = zip(FIELDS, given.columns, strict=True)
    inputs = ForwardInputs(**{name: _unpacked(value, like.device) for name, value in columns})
    shape = len(inputs.logits_indices), like.shape[-1]
    return replace(inputs, aux_hidden_states=tuple((layer, like.new_empty(shape)) for layer in given.aux_hidden_states))


def rows_of(given: Order, device: torch.device = CPU) -> Tensor:
    (rows,) = given.columns
    assert isinstance(rows, TensorBytes)
    return _tensor_of(rows).to(device)


def adapters_of(given: Order) -> list[tuple[int, float, Tensor]]:
    """Returns number, scale and rows of each adapter of a step."""
    return [(one.number, one.scale, _tensor_of(one.rows)) for one in given.adapters]


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


# Receives frames in a thread, so that no sender waits until this rank has computed.
#
# Several steps of a pipeline are in flight, so a rank may get rows and orders while it computes an earlier step. If
# it left them in the buffer of the connection, two ranks that send to each other could wait for one another forever,
# and TCP would give up the connection after BROKEN_S (handshake.py).


class Inbox:
    """The frames that a connection has delivered, from the oldest to the newest."""

    def __init__(self, source: socket.socket) -> None:
        """Starts the thread. Nothing else may read from `source`."""
        self._source = source
        self._frames = SimpleQueue[bytes | None]()  # None: the connection has ended
        self._error: Exception = EOFError()
        threading.Thread(target=self._receive, name="inbox", daemon=True).start()

    def take(self) -> bytes:
        """Waits for the next frame. Raises EOFError when the other side has closed the connection, and OSError."""
        return self._checked(self._frames.get())

    def take_within(self, seconds: float) -> bytes | None:
        """Returns the next frame; None if there is none within `seconds`. Raises EOFError and OSError, see take()."""
        with suppress(Empty):
            return self._checked(self._frames.get(timeout=seconds))
        return None

    def _checked(self, frame: bytes | None) -> bytes:
        if frame is None:
            self._frames.put(None)  # for later calls
            raise self._error
        return frame

    def _receive(self) -> None:
        try:
            while True:
                self._frames.put(receive(self._source))
        except (EOFError, OSError) as error:
            self._error = error
        finally:
            self._frames.put(None)

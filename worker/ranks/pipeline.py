"""The decoder of one rank in pipeline parallelism, where each stage computes other layers, one stage after another.

The rows of a step go round a ring: from rank 0 through all stages, and from the last stage back to rank 0, which has
the LM head. If several ranks share the layers of a stage, each of them has all rows, and sends them to the rank with
the same share of the next stage.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_uint64
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.cpu.ranks_c import RankLost
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.parts.stages import Stage
from worker.ranks.frames import CPU, receive, rows_frame, rows_in, send

PROGRESS_S, PROGRESS_BYTES = 0.2, 4096  # pause between two progress bytes; most bytes read at once
LOST = "a process that computes other layers of the model has died"


class RankDecoder(Protocol):
    """The decoder of a rank. In every step, all ranks call the same methods with equal arguments."""

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor: ...
    def logits(self, h: Tensor) -> Tensor: ...


class AllHeads:
    """The decoder of a rank that has all heads of its layers (no tensor parallelism)."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._layers, self._cache = fastest_decoder(decoder, cache), cache

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Does the same as Decoder.hidden. checked: has no effect, because no other rank has the same numbers."""
        self._cache.reach(inputs.max_pages)
        return self._layers.hidden(inputs, self._cache)

    def logits(self, h: Tensor) -> Tensor:
        return self._layers.logits(h)


@dataclass(slots=True)
class Ring:
    """The connections of a rank to the stages before and after it. After the last stage comes the first one."""

    before: socket.socket
    after: socket.socket
    device: torch.device = CPU  # of the rows that arrive; they travel through the memory of hosts
    lost: bool = False

    def give(self, rows: Tensor) -> None:
        """Sends rows to the next stage. Raises RankLost."""
        try:
            send(self.after, rows_frame(rows))
        except OSError as error:
            raise RankLost(f"{LOST}: {error.strerror}") from error

    def take(self) -> Tensor:
        """Waits for the rows of the stage before. Raises RankLost."""
        try:
            return rows_in(receive(self.before)).to(self.device)
        except (OSError, EOFError) as error:
            raise RankLost(LOST) from error

    def end(self) -> None:
        """Ends the connections, so that no rank waits for another one any more. Any thread may call it."""
        self.lost = True
        for link in (self.before, self.after):
            with suppress(OSError):  # it is closed already
                link.shutdown(socket.SHUT_RDWR)


class StageDecoder:
    """The decoder of one rank of a stage. All ranks call it with the same inputs for a step."""

    def __init__(
        self,
        own: RankDecoder,
        stage: Stage,
        like: Tensor,
        ring: Ring,
        wait: Callable[[socket.socket], None] = lambda before: None,
    ) -> None:
        """own: the decoder of this stage's layers. like: a tensor [..., H] with the dtype of the residual stream.

        wait: called on ranks of the first stage before they receive rows from the last stage.
        """
        self._own, self._stage, self._like, self._ring, self._wait = own, stage, like, ring, wait

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Waits for the rows of the stage before, computes the layers of this stage, and sends the rows on.

        On ranks of the first stage, it returns the result of Decoder.hidden. On other ranks, it returns the rows that
        they have sent. Raises RankLost.
        """
        stage, ring = self._stage, self._ring
        if stage.index:
            inputs = _continued(inputs, ring.take())
        if stage.is_last:
            given = self._own.hidden(inputs, checked=checked)
        else:
            given = self._like.new_empty(len(inputs.token_ids), self._like.shape[-1])
            self._own.hidden(_all_rows(inputs, ((len(stage) - 1, given),)), checked=checked)
        ring.give(given)
        if stage.index:
            return given
        self._wait(ring.before)
        return ring.take()

    def logits(self, h: Tensor) -> Tensor:
        """Does the same as Decoder.logits. Only the first stage has the LM head; ranks of other stages return h."""
        return h if self._stage.index else self._own.logits(h)


def wait_for_rows(before: socket.socket, others: Sequence[socket.socket], layers_started: c_uint64) -> None:
    """Waits on rank 0 until `before` can be read. Raises RankLost.

    Increments `layers_started` when other ranks report progress (tell_progress). Otherwise a step that takes long in
    other stages would look like a hang.
    """
    while before not in (readable := select.select([before, *others], [], [])[0]):
        for other in readable:
            _check_goes_on(other)
        layers_started.value += 1


def _check_goes_on(other: socket.socket) -> None:
    try:
        told = other.recv(PROGRESS_BYTES)
    except OSError as error:
        raise RankLost(f"{LOST}: {error.strerror}") from error
    if not told:
        raise RankLost(LOST)


def tell_progress(layers_started: c_uint64, orders: socket.socket) -> None:
    """Sends rank 0 a byte from time to time while this rank computes layers. Returns when the connection is closed."""
    told = 0
    with suppress(OSError):
        while True:
            time.sleep(PROGRESS_S)
            if (started := layers_started.value) != told:
                told = started
                orders.sendall(b"+")


def _continued(inputs: ForwardInputs, rows: Tensor) -> ForwardInputs:
    """Returns inputs in which the rows of the stage before replace the embeddings."""
    all_rows = torch.arange(len(rows), device=rows.device)
    return replace(inputs, token_ids=torch.zeros_like(inputs.token_ids), replaced=(all_rows, rows), added=())


def _all_rows(inputs: ForwardInputs, tapped: tuple[tuple[int, Tensor], ...]) -> ForwardInputs:
    """Returns inputs that request logits for all rows, because the last layer would drop other rows."""
    every = torch.arange(len(inputs.token_ids), device=inputs.token_ids.device)
    return replace(inputs, logits_indices=every, tapped=tapped)

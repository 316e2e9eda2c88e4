"""A model whose layers are cut into stages, as rank 0 sees it. It begins a step before the last one has ended.

A step that is begun goes through all stages, each of which computes it after the steps that were begun before. Its
rows come back to rank 0, and wait there until they are asked for.
"""

import select
import socket
from collections.abc import Callable, Sequence
from copy import copy
from ctypes import c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from worker.kernels.operations import Operations
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.parts.stages import Stage
from worker.ranks.adapters import adapters_in
from worker.ranks.frames import HIDDEN, LOGITS
from worker.ranks.pipeline import PROGRESS_S, RankDecoder, Ring
from worker.ranks.taps import write_returned
from worker.spec import ModelSpec

if TYPE_CHECKING:  # a feature, which is imported at run time only when needed
    from worker.adapters.operations import AdapterRows

PROGRESS_BYTES = 4096  # the most progress bytes that are read at once


class OrderAll(Protocol):
    """Lets all ranks that an order concerns compute it, see Leader.all."""

    def __call__(
        self,
        compute: str,
        inputs: ForwardInputs | Tensor,
        own: Callable[[bool], Tensor],
        adapters: "Sequence[AdapterRows]" = (),
    ) -> Tensor: ...


class ReturnedRows:
    """The rows that come back to rank 0 from the last stage, in the order in which the steps were begun."""

    def __init__(
        self, ring: Ring, others: Sequence[socket.socket], layers_started: c_uint64, most_in_flight: int
    ) -> None:
        """others: the connections on which other ranks tell their progress.

        layers_started: the count of rank 0. It also grows while rank 0 waits for rows and other ranks tell their
        progress (tell_progress). Otherwise a step that takes long in other stages would look like a hang.
        most_in_flight: how many steps may be in flight, without a dummy step that checks the device meanwhile.
        """
        self._ring, self._others, self._layers_started = ring, others, layers_started
        self._most_in_flight = most_in_flight
        self._rows: dict[int, Tensor] = {}  # by the number of the step, of steps that nobody has asked for yet
        self._begun = self._returned = 0  # how many steps were begun, and how many steps' rows have come back

    def begin(self) -> int:
        """Returns the number of a step that was begun: how many steps were begun before it."""
        self._begun += 1
        return self._begun - 1

    def of_step(self, number: int) -> Tensor:
        """Waits for the rows of a step. Raises RankLost. number: see begin()"""
        while self._returned <= number:
            self._rows[self._returned] = self._next()
            self._returned += 1
        rows = self._rows.pop(number)
        for old in [other for other in self._rows if other <= number - self._most_in_flight]:
            del self._rows[old]  # nobody will ask for it: the step was discarded because another one had failed
        return rows

    def _next(self) -> Tensor:
        while True:
            self._note_progress()
            rows = self._ring.take_within(PROGRESS_S)
            if rows is not None:
                return rows

    def _note_progress(self) -> None:
        for other in select.select(self._others, [], [], 0)[0]:
            with self._ring.ending():
                if not other.recv(PROGRESS_BYTES):
                    raise EOFError
            self._layers_started.value += 1


class StagedModel:
    """A model in stages. It has the interface of Decoder, and begin()."""

    def __init__(
        self, spec: ModelSpec, decoder: Decoder, part: RankDecoder, order_all: OrderAll, returned: ReturnedRows,
        first: Stage,
    ) -> None:  # fmt: skip
        """spec: of the whole model. decoder, part: those of rank 0. first: the first stage, which is rank 0's."""
        self.first, self.stages = first, first.count
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self._part, self._order_all, self.returned = part, order_all, returned
        self._adapters: Sequence[AdapterRows] = ()

    @property
    def pipeline(self) -> "StagedModel":
        """The hook of the runner, see Pipeline in worker/run/model.py."""
        return self

    def begin(self, inputs: ForwardInputs) -> "BegunStep":
        """Begins a step: computes the first stage, and hands the rows to the next one. Raises RankLost."""
        part = self._part
        self._order_all(HIDDEN, inputs, lambda checked: part.hidden(inputs, checked=checked), self._adapters)
        return BegunStep(self.returned.begin(), self)

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.begin(inputs).forward(inputs, cache)

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.begin(inputs).hidden(inputs, cache)

    def logits(self, h: Tensor) -> Tensor:
        return self._order_all(LOGITS, h, lambda checked: self._part.logits(h))

    def with_operations(self, operations: Operations) -> "StagedModel":
        """Returns the model for a step with adapters."""
        other = copy(self)
        other._adapters = adapters_in(operations)
        other._part = self._part.with_adapters(other._adapters)
        return other


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step that was begun, as a model that computes only what is left of this step. number: see ReturnedRows"""

    number: int
    model: StagedModel

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Waits for the result of Decoder.hidden of this step. Raises RankLost. Call it once."""
        return write_returned(self.model.returned.of_step(self.number), inputs.tapped, self.model.first)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.logits(h)

"""The decoder of one rank in pipeline parallelism, where each stage computes other layers, one stage after another.

The rows of a step go round a ring: from rank 0 through all stages, and from the last stage back to rank 0, which has
the LM head. If several ranks share the layers of a stage, each of them has all rows, and sends them to the rank with
the same share of the next stage. Only the first rank of the last stage sends rows back.

Rank 0 begins a step without waiting for the rows of earlier steps, so each stage may compute another
step at the same time. Every rank computes all steps in the same order.
"""

import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from ctypes import c_uint64
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from worker.distributed.lora import adapters_in, with_adapters
from worker.distributed.messages import CPU, HIDDEN, LOGITS, Inbox, rows_frame, rows_in, send
from worker.kv_cache.tensors import KVCache
from worker.lora.ops import AdapterRows
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.per_layer_embeddings import vectors_of_layers
from worker.models.sharding import Part, Stage
from worker.operations import Operations
from worker.ops.exchange import RankLost
from worker.spec import ModelSpec

# What stages of a pipeline send besides the rows: hidden states for drafters, vectors of layers, loads of experts.
#
# Outputs of inner layers that a drafter on rank 0 reads (ForwardInputs.aux_hidden_states), in pipeline parallelism.
#
# The first stage has its outputs in the process that reads them. Every other stage hands on those of its own
# layers to the next stage, as more columns of the rows, in the order of the layers. They come back to rank 0 with the
# result of the last stage.

AuxHiddenStates = Sequence[tuple[int, Tensor]]  # see ForwardInputs.aux_hidden_states


@dataclass(frozen=True, slots=True)
class StageAuxStates:
    """The layers of a step whose outputs are read, for one stage.

    like: a tensor [..., H] with the dtype of the residual stream
    """

    aux_hidden_states: AuxHiddenStates
    stage: Stage
    like: Tensor

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Divides the columns of rows from the previous stage: returns the residual stream (and per-layer embeddings),
        and then the outputs of layers [T, N * H].

        N is the number of aux_hidden_states layers in stages between the first one and this one.
        """
        before = _layers(self.aux_hidden_states, self.stage.bounds[1], self.stage.first)
        end = rows.shape[1] - len(before) * self.like.shape[-1]
        return rows[:, :end], rows[:, end:]

    def buffers(self, rows: int) -> dict[int, Tensor]:
        """Returns a tensor [rows, H] for each layer of this stage whose outputs are handed on, by its index here.

        The output of the stage's last layer is the residual stream that the next stage continues.
        """
        stage = self.stage
        own = [layer - stage.first for layer in _layers(self.aux_hidden_states, stage.first, stage.end)]
        own += [] if stage.is_last else [len(stage) - 1]
        return {index: self.like.new_empty(rows, self.like.shape[-1]) for index in own}

    def onward(self, earlier: Tensor | None, outputs: dict[int, Tensor], with_logits: Tensor) -> list[Tensor]:
        """Returns the columns [rows, H] that this stage hands on. The first stage writes its outputs to
        `aux_hidden_states`.

        earlier: outputs of the stages before; None for the first stage. outputs: the filled `buffers`.
        with_logits: the indices of the rows that are read. The last stage has computed and hands on only these.
        """
        stage = self.stage
        if earlier is None:
            for layer, into in self.aux_hidden_states:
                if layer < stage.end:
                    into.copy_(outputs[layer][with_logits])
            return []
        own = [outputs[layer - stage.first] for layer in _layers(self.aux_hidden_states, stage.first, stage.end)]
        return [earlier[with_logits] if stage.is_last else earlier, *own]


def write_returned(rows: Tensor, aux_hidden_states: AuxHiddenStates, first: Stage) -> Tensor:
    """Writes the outputs of later stages to `aux_hidden_states`. Returns the other rows, the result of Decoder.hidden.

    rows: what the last stage has sent to rank 0. first: the first stage.
    """
    later = _layers(aux_hidden_states, first.end, first.bounds[-1])
    if not later:
        return rows
    result, *outputs = rows.chunk(1 + len(later), dim=1)
    by_layer = dict(aux_hidden_states)
    for layer, output in zip(later, outputs, strict=True):
        by_layer[layer].copy_(output)
    return result.contiguous()


def _layers(aux_hidden_states: AuxHiddenStates, first: int, end: int) -> list[int]:
    return sorted(layer for layer, _ in aux_hidden_states if first <= layer < end)


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Returns rows with these columns side by side."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], dim=1)


# Per-layer embeddings (worker/models/per_layer_embeddings.py) in pipeline parallelism.
#
# The first stage has their table, and computes the vectors of all layers. A stage hands on the vectors of later
# stages together with the residual stream, as further columns of the same rows.


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Divides the vectors of a step between a stage and later stages. decoder: has the layers of the stage

    Without per-layer embeddings, the vectors of later stages are None.
    """

    decoder: Decoder
    stage: Stage

    def begin(self, inputs: ForwardInputs) -> tuple[ForwardInputs, Tensor | None]:
        """Returns the inputs of the first stage with the vectors of its layers, and the vectors of later stages."""
        decoder, weights = self.decoder, self.decoder.weights.per_layer_inputs
        if weights is None:
            return inputs, None
        x = decoder.embedded(inputs)
        return self._divided(inputs, vectors_of_layers(weights, inputs, x, decoder.spec.norm_eps, decoder.operations))

    def take(self, inputs: ForwardInputs, rows: Tensor) -> tuple[ForwardInputs, Tensor | None]:
        """Does the same for another stage. rows: from the previous stage: the residual stream, then the vectors"""
        spec = self.decoder.spec
        stream, vectors = rows[:, : spec.hidden_size].contiguous(), rows[:, spec.hidden_size :]
        inputs = _continued(inputs, stream)
        size = 0 if spec.per_layer_inputs is None else spec.per_layer_inputs.size
        return self._divided(inputs, vectors.reshape(len(rows), -1, size) if size else None)

    def _divided(self, inputs: ForwardInputs, vectors: Tensor | None) -> tuple[ForwardInputs, Tensor | None]:
        if vectors is None:
            return inputs, None
        own = len(self.stage)
        return replace(inputs, of_layers=vectors[:, :own].contiguous()), vectors[:, own:]


def _continued(inputs: ForwardInputs, stream: Tensor) -> ForwardInputs:
    """Returns inputs in which the residual stream of the stage before replaces the embeddings."""
    all_rows = torch.arange(len(stream), device=stream.device)
    return replace(inputs, token_ids=torch.zeros_like(inputs.token_ids), replaced=(all_rows, stream), added=())


# How many rows chose each expert, counted by the stages of a model on one machine (--expert-metrics).
#
# The counts of all layers are in memory that all stages map. Each stage counts the rows of its own layers, and rank 0
# reads all counts. Ranks that share a layer would count the same rows, so only the first of them counts.

ITEM = 8  # bytes of a count


def make_loads(spec: ModelSpec) -> int:
    """Returns a file descriptor of memory for the counts of a model, all zero. spec: of the whole model"""
    memory = os.memfd_create("sluice-experts", os.MFD_CLOEXEC)
    os.ftruncate(memory, max(1, len(spec.layers) * _experts(spec)) * ITEM)
    return memory


def map_loads(memory: int, spec: ModelSpec) -> Tensor:
    """Returns the counts [layers, experts] int64 of the whole model, which other processes read and write, too."""
    shape = len(spec.layers), _experts(spec)
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.int64)[: shape[0] * shape[1]].view(shape)


def own_loads(memory: int, spec: ModelSpec, part: Part) -> Tensor | None:
    """Returns the counts of the layers of a part; None if another rank counts them. spec: of the whole model"""
    if memory < 0 or part.tp_rank:
        return None
    return map_loads(memory, spec)[part.stage.first : part.stage.end]


def _experts(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.count


PROGRESS_S = 0.2  # pause between two progress bytes
LOST = "a process that computes other layers of the model has died"


class RankDecoder(Protocol):
    """The decoder of a rank. In every step, all ranks call the same methods with equal arguments."""

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor: ...
    def logits(self, h: Tensor) -> Tensor: ...
    def with_adapters(self, adapters: Sequence[AdapterRows]) -> "RankDecoder": ...


class AllHeads:
    """The decoder of a rank that has all heads of its layers (no tensor parallelism)."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._layers, self._cache = fastest_decoder(decoder, cache), cache
        self._adapters: Sequence[AdapterRows] = ()

    def with_adapters(self, adapters: Sequence[AdapterRows]) -> "AllHeads":
        """Returns the decoder for a step in which some rows have adapters."""
        other = copy(self)
        other._adapters = adapters
        return other

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Does the same as Decoder.hidden. checked: has no effect, because no other rank has the same numbers."""
        self._cache.reach(inputs.max_pages)
        return with_adapters(self._layers, self._adapters, inputs).hidden(inputs, self._cache)

    def logits(self, h: Tensor) -> Tensor:
        return self._layers.logits(h)


@dataclass(slots=True)
class Ring:
    """The connections of a rank to the stages before and after it. After the last stage comes the first one."""

    before: socket.socket
    after: socket.socket
    device: torch.device = CPU  # of the rows that arrive; they travel through the memory of hosts
    lost: bool = False
    inbox: Inbox = field(init=False)  # of rows from the stage before

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.before)

    def give(self, rows: Tensor) -> None:
        """Sends rows to the next stage. Raises RankLost."""
        with self.ending():
            send(self.after, rows_frame(rows))

    def take(self) -> Tensor:
        """Waits for the rows of the stage before. Raises RankLost."""
        with self.ending():
            return rows_in(self.inbox.take()).to(self.device)

    def take_within(self, seconds: float) -> Tensor | None:
        """Returns the rows of the stage before; None if none arrive within `seconds`. Raises RankLost."""
        with self.ending():
            frame = self.inbox.take_within(seconds)
        return None if frame is None else rows_in(frame).to(self.device)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Ends the ring, and raises RankLost, when a connection has ended."""
        try:
            yield
        except (OSError, EOFError) as error:
            self.end()
            raise RankLost(LOST) from error

    def end(self) -> None:
        """Ends the connections, so that no rank waits for another one any more. Any thread may call it."""
        self.lost = True
        for link in (self.before, self.after):
            with suppress(OSError):  # it is closed already
                link.shutdown(socket.SHUT_RDWR)


class StageDecoder:
    """The decoder of one rank of a stage. All ranks call it with the same inputs for a step."""

    def __init__(self, own: RankDecoder, part: Part, decoder: Decoder, ring: Ring) -> None:
        """own: the decoder of this rank. decoder: has the same layers and weights."""
        self._own, self._part, self._like, self._ring = own, part, decoder.weights.embed.like, ring
        self._vectors = LayerVectors(decoder, part.stage)

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Waits for the rows of the stage before, computes the layers of this stage, and sends the rows on.

        The first stage does not wait: its rows are the embeddings. Returns the rows that this stage has computed. The
        last stage's rows are the result of Decoder.hidden. Raises RankLost.
        """
        stage, ring = self._part.stage, self._ring
        aux, earlier = StageAuxStates(inputs.aux_hidden_states, stage, self._like), None
        if stage.index:
            rows, earlier = aux.apart(ring.take())
            inputs, later = self._vectors.take(inputs, rows)
        else:
            inputs, later = self._vectors.begin(inputs)
        wanted = inputs if stage.is_last else _all_rows(inputs)
        outputs = aux.buffers(len(wanted.logits_indices))
        result = self._own.hidden(replace(wanted, aux_hidden_states=tuple(outputs.items())), checked=checked)
        stream = result if stage.is_last else outputs[len(stage) - 1]
        vectors = [] if later is None else [later.flatten(1)]
        onward = aux.onward(earlier, outputs, inputs.logits_indices)
        computed = joined([stream, *([] if stage.is_last else vectors), *onward])
        if not stage.is_last or not self._part.tp_rank:
            ring.give(computed)
        return computed

    def with_adapters(self, adapters: Sequence[AdapterRows]) -> "StageDecoder":
        """Returns the decoder for a step in which some rows have adapters."""
        other = copy(self)
        other._own = self._own.with_adapters(adapters)
        return other

    def logits(self, h: Tensor) -> Tensor:
        """Does the same as Decoder.logits. Only the first stage has the LM head."""
        return self._own.logits(h)


def tell_progress(layers_started: c_uint64, orders: socket.socket) -> None:
    """Sends rank 0 a byte from time to time while this rank computes layers. Returns when the connection is closed."""
    told = 0
    with suppress(OSError):
        while True:
            time.sleep(PROGRESS_S)
            if (started := layers_started.value) != told:
                told = started
                orders.sendall(b"+")


def _all_rows(inputs: ForwardInputs) -> ForwardInputs:
    """Returns inputs that request logits for all rows, because the last layer would drop other rows."""
    every = torch.arange(len(inputs.token_ids), device=inputs.token_ids.device)
    return replace(inputs, logits_indices=every)


# Rank 0's side of a model that is cut into stages: it begins a step before the last one has ended.
#
# A step that is begun goes through all stages, each of which computes it after the steps that were begun before. Its
# rows come back to rank 0, and wait there until they are requested.

PROGRESS_BYTES = 4096  # the most progress bytes of one read


class OrderAll(Protocol):
    """Lets all ranks that an order concerns compute it, see Leader.all."""

    def __call__(
        self,
        compute: str,
        inputs: ForwardInputs | Tensor,
        own: Callable[[bool], Tensor],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor: ...


class ReturnedRows:
    """The rows that come back to rank 0 from the last stage, in the order in which the steps were begun."""

    def __init__(
        self, ring: Ring, others: Sequence[socket.socket], layers_started: c_uint64, most_in_flight: int
    ) -> None:
        """others: the connections on which other ranks report their progress.

        layers_started: the count of rank 0. It also grows while rank 0 waits for rows and other ranks report progress
        (tell_progress). Otherwise a step that takes long in other stages would look like a hang.
        most_in_flight: how many steps may be in flight, without a dummy step that checks the device meanwhile.
        """
        self._ring, self._others, self._layers_started = ring, others, layers_started
        self._most_in_flight = most_in_flight
        self._rows: dict[int, Tensor] = {}  # number of a step → its rows, until they are requested
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
        """The hook of the runner, see Pipeline in worker/models/forward_inputs.py."""
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
        return write_returned(self.model.returned.of_step(self.number), inputs.aux_hidden_states, self.model.first)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.logits(h)

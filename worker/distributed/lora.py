"""LoRA adapters of several ranks: each rank keeps its part of every adapter.

Rank 0 reads the files of an adapter and sends them to the other ranks, so that only its host needs them. All ranks
check the same files in the same way, so either all ranks can use an adapter or none can. The files are sent in pieces,
between which rank 0 sends the orders of steps, and each rank packs its part in a thread, so that steps go on meanwhile.
A step names its adapters by their numbers.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from shared.lora import AdapterFiles
from worker.distributed.messages import AdapterFrame, AdapterGone, AdapterPiece, NewAdapter
from worker.models.cpu_decoder import CpuDecoder
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.sharding import Part
from worker.operations import Operations
from worker.ops.exchange import RankLost
from worker.spec import ModelSpec

if TYPE_CHECKING:  # a rank whose steps have no adapters does not import them
    from worker.lora.loaded import LoadedAdapter
    from worker.lora.ops import AdapterRows
    from worker.lora.target_modules import Sites

PIECE_BYTES = 1 << 20
PAUSE_S = 0.001  # after each piece, so that a step that waits to be sent comes next


@dataclass(frozen=True, slots=True)
class AdaptersOfRanks:
    """Rank 0's side. part: the part of rank 0; tell_all: sends a frame to all other ranks, and raises RankLost

    When a rank is lost, the next step finds it and ends the worker, so that requests go on in the next worker.
    """

    part: Part
    tell_all: Callable[[msgspec.Struct], None]

    def give(self, number: int, files: AdapterFiles) -> None:
        """Sends an adapter to all other ranks, which begin to load it. number: not used before"""
        with suppress(RankLost):
            self.tell_all(NewAdapter(number, files.config, len(files.weights)))
            for begin in range(0, len(files.weights), PIECE_BYTES):
                self.tell_all(AdapterPiece(number, files.weights[begin : begin + PIECE_BYTES]))
                time.sleep(PAUSE_S)

    def forget(self, number: int) -> None:
        """Lets all other ranks free the memory of an adapter, which no later step uses."""
        with suppress(RankLost):
            self.tell_all(AdapterGone(number))


@dataclass
class OwnAdapters:
    """The adapters of a rank other than 0.

    folder: of the checkpoint. spec: of the whole model. weights: those of `part`, which is the part of this rank.
    """

    folder: Path
    spec: ModelSpec
    weights: Weights
    part: Part
    max_rank: int
    _arriving: dict[int, tuple[NewAdapter, bytearray]] = field(default_factory=dict)
    _loaded: "dict[int, Future[LoadedAdapter]]" = field(default_factory=dict)

    def take(self, frame: AdapterFrame) -> None:
        """Follows a frame of rank 0. An adapter whose last piece has come is loaded in a thread."""
        match frame:
            case NewAdapter(number=number):
                self._arriving[number] = frame, bytearray()
            case AdapterPiece(number=number, data=data):
                new, arrived = self._arriving[number]
                arrived += data
                if len(arrived) == new.nbytes:
                    del self._arriving[number]
                    self._loaded[number] = self._threads.submit(self._load, AdapterFiles(new.config, bytes(arrived)))
            case AdapterGone(number=number):  # an empty file has not even begun to load
                self._arriving.pop(number, None)
                self._loaded.pop(number, None)

    def rows(self, used: Sequence[tuple[int, float, Tensor]]) -> "list[AdapterRows]":
        """Returns the adapters of a step, and waits for those that are still being loaded.

        used: number, scale and rows of each adapter
        """
        from worker.lora.ops import AdapterRows

        return [AdapterRows(self._loaded[number].result(), scale, rows) for number, scale, rows in used]

    def _load(self, files: AdapterFiles) -> "LoadedAdapter":
        from worker.lora.loaded import load_adapter

        embed = self.weights.embed
        return load_adapter(files, self._sites, embed.dtype, embed.device, self.max_rank)

    @cached_property
    def _sites(self) -> "Sites":
        from worker.lora.target_modules import sites_of

        return sites_of(self.folder, self.spec, self.weights, self.part)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="adapter")


def with_adapters(
    layers: Decoder | CpuDecoder,
    adapters: "Sequence[AdapterRows]",
    inputs: ForwardInputs,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Decoder | CpuDecoder:
    """Returns the decoder of this rank's layers for a step in which some rows have adapters.

    inputs: those of this rank. gather: see operations_of_rows; None if this rank has whole layers. Adapters that change
    no layer of this rank are left out.
    """
    changing = [one for one in adapters if not one.adapter.is_empty]
    if not changing:
        return layers
    from worker.lora.ops import operations_of_rows

    return layers.with_operations(operations_of_rows(layers.operations, changing, inputs, gather))


def adapters_in(operations: Operations) -> "Sequence[AdapterRows]":
    """Returns the adapters that the operations of a step add. Only steps with adapters have other operations."""
    from worker.lora.ops import OperationsWithAdapters

    assert isinstance(operations, OperationsWithAdapters)
    return operations.adapters

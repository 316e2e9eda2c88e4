"""How a rank exchanges rows with ranks that have other heads of the same layers, and with ranks of other layers."""

import mmap
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from worker.kernels.cpu.ranks_c import RanksC
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.parts.part import Part
from worker.ranks.frames import CPU, IN_C
from worker.ranks.gpu.devices import exchange_on
from worker.ranks.part import PartDecoder
from worker.ranks.pipeline import AllHeads, RankDecoder, Ring, StageDecoder

if TYPE_CHECKING:  # only ranks on GPUs import torch.distributed
    from worker.ranks.gpu.lanes import Lanes

Links = Mapping[int, socket.socket]  # connections to other ranks


class Connections(Protocol):
    """Connections to other ranks."""

    @property
    def lost(self) -> bool: ...
    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """The connections of a rank. lanes: to ranks that share its layers, or None; ring: to other stages, or None

    sharing: makes the decoder of a rank that shares layers from a Decoder, its cache, `lanes` and their first rank
    join: connects ranks on GPUs once all have loaded their weights; raises RankLost
    """

    part: Part
    lanes: Connections | None
    ring: Ring | None
    sharing: Callable[[Decoder, KVCache, Any, int], RankDecoder] = PartDecoder
    join: Callable[[], None] | None = None

    @classmethod
    def of(cls, part: Part, memory: mmap.mmap, rows: Links, *, by_tcp: bool) -> "Exchange":
        """memory: see RanksC. rows: connections to the ranks before and after in the ring; if by_tcp, to all ranks."""
        lanes, own = None, part.rank - part.lane
        if part.lanes > 1:
            links = {other - own: link for other, link in rows.items() if own <= other < own + part.lanes}
            lanes = RanksC(memory, part.lane, part.lanes, links if by_tcp else None)
        return cls(part, lanes, _ring(part, rows, CPU))

    @classmethod
    def on_gpu(cls, part: Part, lanes: "Lanes | None", rows: Links, device: torch.device) -> "Exchange":
        """lanes: the ranks that share the layers, which have not joined yet. rows: see `of`. device: of this rank"""
        from worker.ranks.gpu.part import GatheringDecoder

        join = (lambda: None) if lanes is None else lanes.join
        return cls(part, lanes, _ring(part, rows, device), GatheringDecoder, join)

    def decoder(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        """Returns the decoder of this rank. decoder: has the rank's spec and weights. Raises CannotShare."""
        own = self._of_stage(decoder, cache)
        return own if self.ring is None else StageDecoder(own, self.part, decoder, self.ring)

    def _of_stage(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        if self.lanes is None:
            return AllHeads(decoder, cache)
        return self.sharing(decoder, cache, self.lanes, self.part.rank - self.part.lane)

    @property
    def lost(self) -> bool:
        """Whether the exchange has ended."""
        return any(one.lost for one in (self.lanes, self.ring) if one is not None)

    def end(self) -> None:
        """Makes other ranks stop waiting for this one, now and later. Any thread may call it."""
        for one in (self.lanes, self.ring):
            if one is not None:
                one.end()


def _ring(part: Part, rows: Links, device: torch.device) -> Ring | None:
    return Ring(rows[part.before], rows[part.after], device) if part.stage.count > 1 else None


def exchange_of_machine(
    part: Part, exchanged: str, memory: int, size: int, rows: Links, device: torch.device
) -> Exchange:
    """Returns the exchange of a rank whose stage is on one machine.

    exchanged: see Beginning.exchange. memory: the file descriptor of `size` bytes that the ranks of the stage share.
    """
    if exchanged == IN_C:
        return Exchange.of(part, mmap.mmap(memory, size), rows, by_tcp=False)
    from worker.ranks.gpu.lanes import lanes_in_memory

    return Exchange.on_gpu(part, lanes_in_memory(part, os.dup(memory), device), rows, device)


def exchange_of_hosts(part: Part, size: int, rows: Links, address: tuple[str, int], device: torch.device) -> Exchange:
    """Returns the exchange of a rank of --rank-group. size: see RanksC; address: host and port of rank 0."""
    if exchange_on(device) == IN_C:
        return Exchange.of(part, mmap.mmap(-1, size), rows, by_tcp=True)
    from worker.ranks.gpu.lanes import lanes_over_tcp

    return Exchange.on_gpu(part, lanes_over_tcp(part, *address, device), rows, device)

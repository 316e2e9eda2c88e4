"""How a rank exchanges rows with ranks that have other heads of the same layers, and with ranks of other layers."""

import mmap
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from worker.kernels.cpu.ranks_c import RanksC
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.parts.part import Part
from worker.ranks.part import PartDecoder
from worker.ranks.pipeline import AllHeads, RankDecoder, Ring, StageDecoder

Links = Mapping[int, socket.socket]  # connections to other ranks


@dataclass(frozen=True, slots=True)
class Exchange:
    """The connections of a rank. lanes: to ranks that share its layers, or None; ring: to other stages, or None"""

    part: Part
    lanes: RanksC | None
    ring: Ring | None

    @classmethod
    def of(cls, part: Part, memory: mmap.mmap, rows: Links, *, by_tcp: bool) -> "Exchange":
        """memory: see RanksC. rows: connections to the ranks before and after in the ring; if by_tcp, to all ranks."""
        lanes, own = None, part.rank - part.lane
        if part.lanes > 1:
            links = {other - own: link for other, link in rows.items() if own <= other < own + part.lanes}
            lanes = RanksC(memory, part.lane, part.lanes, links if by_tcp else None)
        ring = Ring(rows[part.before], rows[part.after]) if part.stage.count > 1 else None
        return cls(part, lanes, ring)

    def decoder(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        """Returns the decoder of this rank. decoder: has the rank's spec and weights. Raises CannotShare."""
        own = self._of_stage(decoder, cache)
        return own if self.ring is None else StageDecoder(own, self.part, decoder, self.ring)

    def _of_stage(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        if self.lanes is None:
            return AllHeads(decoder, cache)
        return PartDecoder(decoder, cache, self.lanes, self.part.rank - self.part.lane)

    @property
    def lost(self) -> bool:
        """Whether the exchange has ended."""
        return any(one.lost for one in (self.lanes, self.ring) if one is not None)

    def end(self) -> None:
        """Makes other ranks stop waiting for this one, now and later. Any thread may call it."""
        for one in (self.lanes, self.ring):
            if one is not None:
                one.end()

"""How a rank exchanges rows with ranks that have other heads of the same layers, and with ranks of other layers."""

import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.distributed.checks import RankDiffers, checksum, differing
from worker.distributed.lora import with_adapters
from worker.distributed.messages import CPU, IN_C
from worker.distributed.nccl import ShardGroup, exchange_on
from worker.distributed.pipeline import AllHeads, RankDecoder, Ring, StageDecoder
from worker.kv_cache.tensors import KVCache
from worker.lora.ops import AdapterRows
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.sharding import CannotShare, Part
from worker.operations import FAST
from worker.ops.exchange import RanksC
from worker.ops.linear import linear
from worker.ops.linear.packed import PackedLinear

# The decoder of one rank. It has a part of the model, and computes each step together with the other ranks.


class PartDecoder:
    """The decoder of one rank. All ranks call the same methods with equal arguments, and get equal results."""

    def __init__(self, decoder: Decoder, cache: KVCache, ranks: RanksC, first: int = 0) -> None:
        """decoder: has the spec and weights of this rank (models/sharding.py). first: the first rank of `ranks`

        Raises CannotShare without the C library.
        """
        layers = fastest_decoder(decoder, cache, ranks)
        if not isinstance(layers, CpuDecoder):
            raise CannotShare("--tensor-parallel-size needs the C library, which does not compute this model here")
        self._layers, self._cache, self._ranks, self._first = layers, cache, ranks, first
        self._adapters: Sequence[AdapterRows] = ()
        self._head = decoder.with_operations(replace(FAST, linear=self._whole_linear))

    def with_adapters(self, adapters: "Sequence[AdapterRows]") -> "PartDecoder":
        """Returns the decoder for a step in which some rows have adapters."""
        other = copy(self)
        other._adapters = adapters
        return other

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Computes the same as Decoder.hidden of the whole model. Raises RankLost.

        checked: whether ranks compare the residual stream and its norm, which every rank has in full. If they differ,
            the first rank raises RankDiffers.
        """
        self._cache.reach(inputs.max_pages)
        layers = with_adapters(self._layers, self._adapters, inputs, self._ranks.gather)
        h = layers.hidden(inputs, self._cache)
        if checked:  # the loop in Python, for adapters of experts, keeps no residual stream
            stream = checksum(layers.residual(len(inputs.token_ids))) if isinstance(layers, CpuDecoder) else 0
            self._compare(checksum(h, stream))
        return h

    def _compare(self, own: int) -> None:
        sums = self._ranks.gather(torch.tensor([[own]])).flatten().tolist()
        if self._ranks.rank == 0 and (rank := differing(sums)) is not None:
            raise RankDiffers(self._first + rank, "has another residual stream than most ranks")

    def logits(self, h: Tensor) -> Tensor:
        """Computes the same as Decoder.logits of the whole model. Raises RankLost."""
        return self._head.logits(h)

    def _whole_linear(self, x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        return self._ranks.gather(linear(x, packed, **how))


Links = Mapping[int, socket.socket]  # connections to other ranks


class Connections(Protocol):
    """Connections to other ranks."""

    @property
    def lost(self) -> bool: ...
    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """The connections of a rank. shards: to ranks that share its layers, or None; ring: to other stages, or None

    sharing: makes the decoder of a rank that shares layers from a Decoder, its cache, `shards` and their first rank
    join: connects ranks on GPUs once all have loaded their weights; raises RankLost
    """

    part: Part
    shards: Connections | None
    ring: Ring | None
    sharing: Callable[[Decoder, KVCache, Any, int], RankDecoder] = PartDecoder
    join: Callable[[], None] | None = None

    @classmethod
    def of(cls, part: Part, memory: mmap.mmap, rows: Links, *, by_tcp: bool) -> "Exchange":
        """memory: see RanksC. rows: connections to the ranks before and after in the ring; if by_tcp, to all ranks."""
        shards, own = None, part.rank - part.tp_rank
        if part.tp_size > 1:
            links = {other - own: link for other, link in rows.items() if own <= other < own + part.tp_size}
            shards = RanksC(memory, part.tp_rank, part.tp_size, links if by_tcp else None)
        return cls(part, shards, _ring(part, rows, CPU))

    @classmethod
    def on_gpu(cls, part: Part, shards: "ShardGroup | None", rows: Links, device: torch.device) -> "Exchange":
        """shards: the ranks that share the layers, which have not joined yet. rows: see `of`. device: of this rank"""
        from worker.distributed.nccl import GatheringDecoder

        join = (lambda: None) if shards is None else shards.join
        return cls(part, shards, _ring(part, rows, device), GatheringDecoder, join)

    def decoder(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        """Returns the decoder of this rank. decoder: has the rank's spec and weights. Raises CannotShare."""
        own = self._of_stage(decoder, cache)
        return own if self.ring is None else StageDecoder(own, self.part, decoder, self.ring)

    def _of_stage(self, decoder: Decoder, cache: KVCache) -> RankDecoder:
        if self.shards is None:
            return AllHeads(decoder, cache)
        return self.sharing(decoder, cache, self.shards, self.part.rank - self.part.tp_rank)

    @property
    def lost(self) -> bool:
        """Whether the exchange has ended."""
        return any(one.lost for one in (self.shards, self.ring) if one is not None)

    def end(self) -> None:
        """Makes other ranks stop waiting for this one, now and later. Any thread may call it."""
        for one in (self.shards, self.ring):
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
    from worker.distributed.nccl import shard_group_in_memory

    return Exchange.on_gpu(part, shard_group_in_memory(part, os.dup(memory), device), rows, device)


def exchange_of_hosts(part: Part, size: int, rows: Links, address: tuple[str, int], device: torch.device) -> Exchange:
    """Returns the exchange of a rank of --rank-group. size: see RanksC; address: host and port of rank 0."""
    if exchange_on(device) == IN_C:
        return Exchange.of(part, mmap.mmap(-1, size), rows, by_tcp=True)
    from worker.distributed.nccl import shard_group_over_tcp

    return Exchange.on_gpu(part, shard_group_over_tcp(part, *address, device), rows, device)

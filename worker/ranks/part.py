"""The decoder of one rank. It has a part of the model, and computes each step together with the other ranks."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker.kernels.cpu.ranks_c import RanksC
from worker.kernels.linear import PackedLinear, linear
from worker.kernels.operations import FAST
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import CpuDecoder, fastest_decoder
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.parts.share import CannotShare
from worker.ranks.adapters import with_adapters
from worker.ranks.checks import RankDiffers, checksum, differing

if TYPE_CHECKING:  # a feature, which is imported at run time only when needed
    from worker.adapters.operations import AdapterRows


class PartDecoder:
    """The decoder of one rank. All ranks call the same methods with equal arguments, and get equal results."""

    def __init__(self, decoder: Decoder, cache: KVCache, ranks: RanksC, first: int = 0) -> None:
        """decoder: has the spec and weights of this rank (model/parts/share.py). first: the first rank of `ranks`

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

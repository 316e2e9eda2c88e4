"""The decoder of a rank on a GPU that has a part of each layer. It computes each step together with the other ranks."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.ranks.checks import RankDiffers, checksum, differing
from worker.ranks.gpu.lanes import Lanes
from worker.ranks.gpu.operations import gathering

if TYPE_CHECKING:  # a feature, which no rank on a GPU has
    from worker.adapters.operations import AdapterRows


class GatheringDecoder:
    """The decoder of one rank. All ranks call the same methods with equal arguments, and get equal results."""

    def __init__(self, decoder: Decoder, cache: KVCache, lanes: Lanes, first: int = 0) -> None:
        """decoder: has the spec and weights of this rank (model/parts/share.py). first: the first rank of `lanes`"""
        self._decoder = copy(decoder)
        self._decoder.exchange = gathering(lanes.rank, lanes.count, lanes.gather)
        self._cache, self._lanes, self._first = cache, lanes, first

    def with_adapters(self, adapters: "Sequence[AdapterRows]") -> "GatheringDecoder":
        """Returns the decoder for a step: this one, as workers with several GPUs are refused to have adapters."""
        assert not adapters
        return self

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Computes the same as Decoder.hidden of the whole model, and waits for the result. Raises RankLost.

        checked: whether ranks compare the result, which every rank has in full. If it differs, rank 0 raises
            RankDiffers.
        """
        h = self._decoder.hidden(inputs, self._cache)
        if checked:
            self._compare(checksum(h))
        self._lanes.settle()
        return h

    def _compare(self, own: int) -> None:
        sums = self._lanes.gather(torch.tensor([[own]], device=self._cache.device)).flatten().tolist()
        if self._lanes.rank == 0 and (rank := differing(sums)) is not None:
            raise RankDiffers(self._first + rank, "has another residual stream than most ranks")

    def logits(self, h: Tensor) -> Tensor:
        """Computes the same as Decoder.logits of the whole model, and waits for the result. Raises RankLost."""
        logits = self._decoder.logits(h)
        self._lanes.settle()
        return logits

"""The decoder of one rank: it has a part of the model, and computes each step together with the other ranks."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from worker.kernels.cpu.ranks_c import RanksC
from worker.kernels.linear import PackedLinear, linear
from worker.kernels.operations import FAST
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import CpuDecoder, fastest_decoder
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.share import CannotShare


class PartDecoder:
    """All ranks call the same methods with equal arguments, and get equal results. Each waits for the others."""

    def __init__(self, decoder: Decoder, cache: KVCache, ranks: RanksC) -> None:
        """decoder: of this rank's spec and weights (model/share.py). Raises CannotShare without the C library."""
        layers = fastest_decoder(decoder, cache, ranks)
        if not isinstance(layers, CpuDecoder):
            raise CannotShare("--tensor-parallel-size needs the C library, which does not compute this model here")
        self._layers, self._cache, self._ranks = layers, cache, ranks
        self._head = decoder.with_operations(replace(FAST, linear=self._whole_linear))

    def hidden(self, inputs: ForwardInputs) -> Tensor:
        """Computes the same as Decoder.hidden of the whole model. Raises RankLost."""
        self._cache.reach(inputs.max_pages)
        return self._layers.hidden(inputs, self._cache)

    def logits(self, h: Tensor) -> Tensor:
        """Computes the same as Decoder.logits of the whole model. Raises RankLost."""
        return self._head.logits(h)

    def _whole_linear(self, x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        return self._ranks.gather(linear(x, packed, **how))

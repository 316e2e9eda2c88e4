"""Two ranks have half of the rows of every expert: together, their kernels give the bits of all rows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.gpu_experts import experts_on_triton, layer_of
from worker.ops.moe.packed import Experts, PackedExperts

COUNT, CHOSEN, HIDDEN, INNER, RANKS = 5, 2, 128, 64, 2


def share(layer: Experts, rank: int) -> Experts:
    """Returns the experts of a rank: half of the rows of gate, of up and of down."""

    def rows(packed: PackedExperts, sections: int) -> PackedExperts:
        own = [part.chunk(RANKS, dim=1)[rank] for part in packed.weight.chunk(sections, dim=1)]
        return replace(packed, weight=torch.cat(own, dim=1).contiguous())

    return replace(layer, gate_up=rows(layer.gate_up, 2), down=rows(layer.down, 1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("rows", [1, 9])
def test_ranks_give_the_bits_of_all_rows_of_the_experts(rows: int, device: str) -> None:
    layer = layer_of(COUNT, HIDDEN, INNER, dtype=torch.float16, device=device)
    h, add = (random(rows, HIDDEN, dtype=torch.float16, device=device, seed=seed) for seed in (1, 2))
    given: dict[int, Tensor] = {}

    def computed(rank: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        own = add.chunk(RANKS, dim=1)[rank]
        return experts_on_triton(h, share(layer, rank), CHOSEN, "silu", normalized=True, add=own, gather=gather)

    for rank in range(RANKS):  # finds what the ranks exchange, with any columns in place of those of the other rank

        def keep(inner: Tensor, rank: int = rank) -> Tensor:
            given[rank] = inner
            return inner.repeat(1, RANKS)

        computed(rank, keep)
    exchanged = torch.cat([given[rank] for rank in range(RANKS)], dim=1)
    found = torch.cat([computed(rank, lambda inner: exchanged) for rank in range(RANKS)], dim=1)
    assert torch.equal(found, experts_on_triton(h, layer, CHOSEN, "silu", normalized=True, add=add))

"""Two ranks whose decoders run Triton kernels, except attention's: the bits of one decoder with the same kernels."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.patience import PATIENCE_S
from tests.worker.distributed.threads import together
from tests.worker.ops.harness.decoders import PLAIN, SANDWICH, decoder_of
from tests.worker.ops.test_operations import logits, low_bit, on_triton, one, others
from worker.distributed.nccl import gathering, side_by_side
from worker.models.decoder import Decoder
from worker.models.sharding import SECTIONS, Share
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.packed import PackedLinear
from worker.spec import ModelSpec

RANKS = 2


class Turns:
    """The exchange of ranks in threads. Only one of them computes at a time: the interpreter knows one kernel."""

    def __init__(self) -> None:
        self.given = [torch.empty(0)] * RANKS
        self.turn, self.barrier = threading.Lock(), threading.Barrier(RANKS, timeout=PATIENCE_S)

    def columns(self, rank: int, own: Tensor) -> Tensor:
        self.given[rank] = own
        self._wait()
        whole = side_by_side(torch.stack(self.given))
        self._wait()
        return whole

    def _wait(self) -> None:
        self.turn.release()
        self.barrier.wait()
        self.turn.acquire()


def part_of(model: Decoder, share: Share) -> Decoder:
    """Returns the decoder of a rank, with its rows of each weight."""
    spec, weights = model.spec, model.weights

    def rows(packed: PackedLinear, field: str, kind: str) -> PackedLinear:
        whole = len(packed.weight)
        kept = share._kept(SECTIONS[kind, field](whole, spec, spec.layers[0]))
        return replace(packed, weight=packed.weight[kept], whole_rows=whole)

    layers = []
    for layer in weights.layers:
        mixer: Any = layer.mixer
        mlp: Any = layer.feed_forward
        mixer = replace(mixer, **{name: rows(getattr(mixer, name), name, "attention") for name in ("qkv", "o")})
        mlp = replace(mlp, **{name: rows(getattr(mlp, name), name, "") for name in ("gate_up", "down")})
        layers.append(replace(layer, mixer=mixer, feed_forward=mlp))
    head = weights.head.weight
    own = replace(weights.head, weight=head[share.head(len(head))], whole_rows=len(head))
    return Decoder(share.spec(spec), replace(weights, layers=layers, head=own), 64)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """So few that `o` and `down` have one chain of additions, and half of their rows alone would have two."""
    caches = tiles.chain_length, tiles.choose_tile, tiles.choose_gated_tile
    monkeypatch.setattr(tiles, "NUM_SMS", 4 - 12)
    for chosen in caches:
        chosen.cache_clear()
    for depth in (PLAIN.heads * PLAIN.head_dim, PLAIN.intermediate_size):
        assert tiles.chain_length(PLAIN.hidden_size, depth) >= depth > tiles.chain_length(PLAIN.hidden_size // 2, depth)
    yield
    for chosen in caches:
        chosen.cache_clear()


@pytest.mark.parametrize(("spec", "scheme"), [(SANDWICH, ""), (PLAIN, "int4"), (PLAIN, "int8-dynamic")])
def test_ranks_give_the_bits_of_one_decoder(spec: ModelSpec, scheme: str) -> None:
    model, turns = decoder_of(spec), Turns()

    def computed(rank: int) -> Tensor:
        with turns.turn:
            decoder = on_triton(low_bit(part_of(model, Share(rank, RANKS)), scheme))
            decoder.exchange = gathering(rank, RANKS, partial(turns.columns, rank))
            return logits(decoder, [one(), *others()])

    expected = logits(on_triton(low_bit(model, scheme)), [one(), *others()])
    for found in together([partial(computed, rank) for rank in range(RANKS)]):
        assert torch.equal(found, expected)

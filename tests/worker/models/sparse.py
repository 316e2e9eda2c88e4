"""Puts experts into the layers of a dense decoder, for tests without a checkpoint of a family with experts."""

from collections.abc import Sequence
from dataclasses import replace

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.experts import Sizes, made
from worker.models.decoder import Decoder, Layer, Weights
from worker.models.mlp import DenseWeights
from worker.models.moe import MixtureWeights
from worker.ops.linear.packed import PackedLinear, pack
from worker.ops.quantized_weight import INT4, CodeMap
from worker.spec import ExpertsSpec

MIXES: dict[str, tuple[tuple[str, ...], list[CodeMap | None]]] = {  # name → (kinds of layers, formats of experts)
    "every layer": (("sparse", "sparse"), [None]),
    "after a dense layer": (("dense", "sparse"), [INT4]),
    "before a dense layer": (("sparse", "dense"), [INT4]),
    "shared": (("shared", "dense"), [None]),
    "shared with a gate": (("gated", "gated"), [INT4, None]),
}
COUNT, CHOSEN, INNER, SHARED = 6, 3, 48, 64


def sparse(decoder: Decoder, kinds: Sequence[str], code_maps: list[CodeMap | None]) -> Decoder:
    """Returns the decoder with layers of these kinds in turn.

    A kind is dense, sparse, shared (sparse with a shared expert), or gated (the shared expert has a gate).
    """
    spec, weights = decoder.spec, decoder.weights
    kinds = [kinds[i % len(kinds)] for i in range(len(spec.layers))]
    layers = [_layer(*pair, spec.hidden_size, code_maps) for pair in zip(weights.layers, kinds, strict=True)]
    chosen = ExpertsSpec(
        count=COUNT, chosen=CHOSEN, intermediate_size=INNER, normalized=True, bias=True,
        shared_size=SHARED, shared_gated="gated" in kinds,
    )  # fmt: skip
    kinds_of_layers = tuple(
        replace(layer, sparse=kind != "dense") for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return Decoder(
        replace(spec, layers=kinds_of_layers, experts=chosen),
        Weights(weights.embed, layers, weights.norm, weights.head),
        decoder.max_positions,
    )


def _layer(layer: Layer, kind: str, hidden: int, code_maps: list[CodeMap | None]) -> Layer:
    if kind == "dense":
        return layer
    dtype = layer.before_mlp.dtype

    def linear(n: int, k: int) -> PackedLinear:
        return pack((random(n, k) / k**0.5).to(dtype), invariant=True)

    has_shared = kind != "sparse"
    shared = DenseWeights(gate_up=linear(2 * SHARED, hidden), down=linear(hidden, SHARED)) if has_shared else None
    mixture = MixtureWeights(
        experts=made(Sizes(COUNT, hidden, INNER, bias=True), dtype, code_maps)[0],
        shared=shared,
        shared_gate=linear(1, hidden) if kind == "gated" else None,
    )
    return replace(layer, feed_forward=mixture)

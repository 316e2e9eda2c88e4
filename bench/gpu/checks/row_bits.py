"""Checks that a row of a matrix product has the same bits for any number of rows in the product."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu.checks.cases_few_bits import few_bits_weight
from bench.gpu.checks.determinism import BASE, DYNAMIC_QUANTIZED, QUANTIZED_WEIGHTS
from bench.gpu.checks.random_inputs import RandomTensors
from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.setup.weights import random_weights
from bench.gpu.tables import FAIL, PASS
from worker.models.decoder import Weights
from worker.models.mlp import DenseWeights
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import PackedLinear, pack_stacked
from worker.ops.norm.reference import sum_split_k
from worker.ops.quantized_weight import INT4
from worker.spec import ModelSpec

ROWS = (1, 16, 17, 64, 65, 128, 129, 257, 2048)  # just below and just above the row counts at which the tile changes
FEW_ROWS = (1, 16, 17, 65)  # without a GPU

Product = Callable[[Tensor], Tensor]


@torch.inference_mode()
def check_rows(env: Environment, model: str) -> Iterator[Row]:
    """Checks the matrix products with every weight of a layer and with the head, as a step computes them."""
    spec, first = spec_of(model, 1), model == env.models[0]
    formats = (*QUANTIZED_WEIGHTS, *(DYNAMIC_QUANTIZED if env.cuda else ())) if first else ()
    for setup in (BASE, *formats):
        weights = random_weights(spec, env.dtype, env.device, seed=env.seed, scheme=setup.weights)
        for name, product in _products(spec, weights).items():
            if setup is BASE or name != "head":  # the head is not quantized
                yield _row(env, f"bits of rows, {model}{setup.description}, {name}", *product)
    if first:
        size, random = spec.hidden_size, RandomTensors(env)
        codes = few_bits_weight(random, spec.qkv_size, size, INT4, 32, torch.bfloat16, minimum=True)
        packed = pack_stacked([codes], dtype=env.dtype, invariant=True)
        yield _row(env, f"bits of rows, {model}, int4 weights, qkv", size, lambda x: linear(x, packed))


def _products(spec: ModelSpec, weights: Weights) -> dict[str, tuple[int, Product]]:
    """Returns name → (columns of the input, function that computes the product)."""
    layer, head, hidden = weights.layers[0], weights.head, spec.hidden_size

    def summed(packed: PackedLinear) -> Product:
        return lambda x: sum_split_k(linear(x, packed, split_k=True), 2, x.dtype)

    qkv, *_ = layer.mixer.linears
    found = {"qkv": (hidden, summed(qkv)), "o": (spec.heads * spec.head_dim, summed(layer.mixer.o))}
    if isinstance(mlp := layer.feed_forward, DenseWeights):
        found["gate_up"] = hidden, lambda x: gated_linear(x, mlp.gate_up, spec.activation)
        found["down"] = spec.intermediate_size, summed(mlp.down)
    return found | {"head": (hidden, lambda x: linear(x, head, fp32_out=True))}


def _row(env: Environment, what: str, width: int, product: Product) -> Row:
    sizes = ROWS if env.cuda else FEW_ROWS
    made = torch.randn(max(sizes), width, generator=env.generator(), device=env.device)
    x = made.to(env.dtype)
    expected, differ, worst = product(x), list[str](), 0.0
    for rows in sizes:
        got = product(x[:rows].contiguous())
        worst = max(worst, float((got.float() - expected[:rows].float()).abs().max()))
        if not torch.equal(got, expected[:rows]):
            differ.append(str(rows))
    row: Row = {"what": what, "cases": len(sizes), "worst": worst, "bound": 0.0, "result": FAIL if differ else PASS}
    return row | ({"note": f"other bits than with {max(sizes)} rows: with {', '.join(differ)}"} if differ else {})

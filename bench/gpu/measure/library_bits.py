"""Compares the bits of cuBLAS's matrix products with the bits of ours.

cuBLAS can give our bits only if it does not split K. So it gets too little memory for partial sums (SCARCE).
"""

import os
from collections.abc import Iterator

import torch

from bench.gpu.checks.random_inputs import RandomTensors
from bench.gpu.environment import Environment, Row
from worker.model_runner.check_bits import same_bits
from worker.ops.linear import linear
from worker.ops.linear.cublas import SCARCE, cublas_linear
from worker.ops.linear.packed import PackedLinear

# Weights whose K we do not split: Llama-3.2-3B's gate and up, Llama-3.2-3B's head, Qwen3-4B's gate and up.
WEIGHTS, ROWS = ((16384, 3072), (128256, 3072), (19456, 2560)), (1, 16, 64, 65, 257, 2048)
NEED_S = 3.0
COLUMNS = ("same bits", "row 0 alone")


@torch.inference_mode()
def compared(env: Environment, n: int, k: int, rows: int) -> Row:
    """Compares our product with a random weight [n, k] and the library's product, in float32. Returns two columns.

    same bits: whether both products have the same bits. row 0 alone: whether the library computes the same bits for
    the first row when it is computed without the other rows.
    """
    random = RandomTensors(env)
    weight, x = random(n, k), random(rows, k)
    try:
        found, alone = (cublas_linear(part, weight, None, fp32_out=True) for part in (x, x[:1]))
        ours = linear(x, PackedLinear(weight, None, True), fp32_out=True)
    except RuntimeError as error:
        return dict.fromkeys(COLUMNS, f"fails: {str(error).splitlines()[0][:60]}")
    return dict(zip(COLUMNS, map(_answer, (same_bits(found, ours), same_bits(found[:1], alone))), strict=True))


def _answer(same: bool) -> str:
    return "yes" if same else "no"


def known_weights(env: Environment) -> Iterator[Row]:
    """Compares the products of each of WEIGHTS with each of ROWS, and yields a row for each product. The bits of the
    products decide whether the library can be used at all."""
    for n, k in WEIGHTS:
        for rows in ROWS:
            row: Row = {"model": library_name(), "weight": f"{n} x {k}", "rows": rows}
            if late := env.skip_reason(NEED_S):
                yield row | {"note": late}
                continue
            size = (n, k, rows) if env.cuda else (n // 512, k // 16, rows)
            yield row | compared(env, *size)


def library_name() -> str:
    scarce = all(os.environ.get(name) == value for name, value in SCARCE.items())
    return "library" if scarce else "library that may split K"

"""Finds before serving the matrix products that the vendor's library computes with the same bits as our kernels
(--gpu-options library_products).

A weight of each shape and format is multiplied by random rows, for several numbers of rows: powers of two, three times
these, and the sizes of the largest steps. From then on, the library computes a product only if its bits were equal to
ours, and if the first row had the same bits as when it is computed alone.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from shared.config import WorkerConfig, words
from worker.kernels.library_products import (
    FEWEST_ROWS,
    SCARCE,
    Product,
    can_be_library,
    fewest_rows,
    library_linear,
    product_of,
    weight_of_numbers,
    with_library,
)
from worker.kernels.linear import PackedLinear, linear
from worker.model.decoder import Decoder
from worker.model.layer import Weights

log = logging.getLogger("sluice.load")

OPTION = "library_products"
MOST_HEAD_ROWS = 512  # the maximum rows to compare for the output head, because a step computes few rows of logits
ANY = 1 << 62
Multiply = Callable[..., Tensor]


def with_equal_library_products(decoder: Decoder, worker: WorkerConfig) -> Decoder:
    """Returns the decoder. With `library_products`, the library computes the products for which its bits equal ours."""
    if OPTION not in words(worker.gpu_options) or worker.kernels == "torch":
        return decoder
    return with_checked_library(decoder, row_counts(worker.max_step_tokens, worker.prefill_chunk_size))


def with_checked_library(decoder: Decoder, counts: Iterable[int]) -> Decoder:
    """Returns a decoder in which the library computes products of `counts` rows if our kernels give the same bits."""
    shapes, counts, problems = list(_shapes(decoder.weights)), sorted(counts), dict[Product, str]()
    if not shapes:
        return decoder
    for name, value in SCARCE.items():
        os.environ.setdefault(name, value)
    for packed, most in shapes:
        for product, problem in compare(packed, [count for count in counts if fewest_rows(packed) <= count <= most]):
            problems[product] = problems.get(product, "") or problem
    equal = frozenset(product for product, problem in problems.items() if not problem)
    others = {f"{one.columns} x {one.depth} {problem}": None for one, problem in problems.items() if problem}
    log.info(
        "the library computes %d products of many rows, with the bits of our kernels%s",
        len(equal), f"; not those of weights {', '.join(others)}" if others else "",
    )  # fmt: skip
    return decoder.with_operations(with_library(decoder.operations, equal))


def row_counts(*largest: int) -> set[int]:
    """Returns the numbers of rows to compare: the numbers in `largest`, and powers of two and three times powers of two
    up to the largest of them.
    """
    most = max(largest)
    between = {factor << exponent for exponent in range(most.bit_length()) for factor in (1, 3)}
    return {count for count in between | {*largest} if FEWEST_ROWS <= count <= most}


@torch.inference_mode()
def compare(
    packed: PackedLinear, counts: list[int], ours: Multiply = linear, library: Multiply = library_linear
) -> Iterator[tuple[Product, str]]:
    """Yields each product of a weight with `counts` rows, and why the library must not compute it ("" if it may)."""
    device, dtype = packed.weight.device, packed.weight.dtype
    depth = product_of(packed.weight, packed).depth
    generator = torch.Generator(device).manual_seed(0)
    for rows in counts:
        x = torch.randn(rows, depth, generator=generator, device=device).to(dtype)
        yield product_of(x, packed), _problem(x, packed, ours, library)


def _problem(x: Tensor, packed: PackedLinear, ours: Multiply, library: Multiply) -> str:
    try:
        for wide in (False, True):
            alone, expected = (ours(rows, packed, fp32_out=wide) for rows in (x[:1], x))
            weight = weight_of_numbers(packed, x.dtype)
            found = library(x, weight, packed.bias, fp32_out=wide, whole_rows=packed.whole_rows)
            if not same_bits(found, expected):
                return "has other bits"
            if not same_bits(found[:1], alone):
                return "gives a row other bits than alone"
    except Exception as error:
        return f"fails ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})"
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _shapes(weights: Weights) -> Iterator[tuple[PackedLinear, int]]:
    """Yields one weight of each shape, and the maximum number of rows that it is multiplied by."""
    of_layers = (packed for layer in weights.layers for packed in layer.linears if isinstance(packed, PackedLinear))
    seen: set[tuple[object, ...]] = set()
    for packed, most in (*((packed, ANY) for packed in of_layers), (weights.head, MOST_HEAD_ROWS)):
        if not can_be_library(packed):
            continue
        shape = product_of(packed.weight, packed), packed.whole_rows, packed.bias is None, most
        if shape not in seen:
            seen.add(shape)
            yield packed, most

"""Computes products of many rows with the vendor's library (cuBLAS), where a check has seen the same bits as from our
kernels.

A GEMM of the library adds along K in an order that may depend on the number of rows. So the library computes only
products whose weight shape and number of rows have been compared on this device (worker/model_runner/check_bits.py).
Our kernels compute all other products. A weight of four or eight bits in groups is first turned into a tensor for the
one product. If the K of a weight is split into chains (triton_tiles.py), the library computes each chain, and the
partial sums are added in order.

cuBLAS would split K among programs if it had memory for partial sums. The environment variables in SCARCE take this
memory away. They must be set before the library is used for the first time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.ops.activation import act_and_mul
from worker.ops.linear.packed import PackedLinear
from worker.ops.norm.reference import sum_split_k
from worker.spec import Activation

SCARCE: Mapping[str, str] = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
FEWEST_ROWS = 256
FEWEST_ROWS_OF_CODES = 2048  # with fewer rows, turning codes into a tensor takes longer than the library saves


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """The shape of a matrix product: x [rows, depth] @ weight [columns, depth].T.

    format: describes the codes of a quantized weight; empty for a weight of numbers.
    """

    columns: int
    depth: int
    rows: int
    format: str = ""


def cublas_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *,
    fp32_out: bool = False, split_k: bool = False, whole_rows: int = 0,
) -> Tensor:  # fmt: skip
    """Computes the same as `linear_triton`, but with the library: in the same chains, rounded at the same places.

    Returns [T, N] in x's dtype, or in float32 if `fp32_out`. With `split_k` and S chains, returns their partial sums
    [S, T, N] float32. whole_rows: see PackedLinear.
    """
    from worker.ops.linear.triton_tiles import chain_length

    columns, depth = weight.shape
    chain = chain_length(whole_rows or columns, depth)
    if depth <= chain and bias is None and not fp32_out:
        return torch.mm(x, weight.T)
    begins = range(0, depth, chain)
    terms = torch.empty(len(begins), len(x), columns, dtype=torch.float32, device=x.device)
    for term, begin in zip(terms, begins, strict=True):
        multiply_wide(x[:, begin : begin + chain], weight[:, begin : begin + chain], out=term)
    if bias is not None:
        terms[0] += bias
    return terms if split_k and len(begins) > 1 else sum_split_k(terms, 2, torch.float32 if fp32_out else x.dtype)


def multiply_wide(x: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """Stores x @ weight.T in `out` [T, N] float32, without rounding to x's dtype."""
    if x.is_cuda and x.dtype != torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weight.T.float(), out=out)


def can_use_cublas(packed: PackedLinear) -> bool:
    """Returns whether the library may multiply by the weight: its products must be batch-invariant, and it is a tensor
    of numbers, or has codes whose inputs are in order.
    """
    in_order = all(part.input_order is None for part in packed.codes)
    return packed.invariant and packed.cpu is None and packed.scale is None and in_order


def fewest_rows(packed: PackedLinear) -> int:
    """Returns the least number of rows that the library may multiply by the weight."""
    return FEWEST_ROWS_OF_CODES if packed.codes else FEWEST_ROWS


def product_of(x: Tensor, packed: PackedLinear) -> Product:
    if not packed.codes:
        columns, depth = packed.weight.shape
        return Product(columns, depth, len(x))
    columns = sum(part.shape[0] for part in packed.codes)
    format = ", ".join(f"{part.shape[0]} of {part.format}" for part in packed.codes)
    return Product(columns, packed.codes[0].shape[1], len(x), format)


def weight_of_numbers(packed: PackedLinear, dtype: torch.dtype) -> Tensor:
    """Returns the weight [N, K] as one tensor. Codes become numbers in `dtype`, in new memory."""
    if not packed.codes:
        return packed.weight
    from worker.ops.linear.triton_unpack import unpack_triton

    return unpack_triton(packed.codes, dtype)


def _is_equal(equal: frozenset[Product], x: Tensor, packed: PackedLinear) -> bool:
    return len(x) >= fewest_rows(packed) and can_use_cublas(packed) and product_of(x, packed) in equal


def linear_with_cublas(
    ours: Callable[..., Tensor], equal: frozenset[Product], x: Tensor, packed: PackedLinear, **how: Any
) -> Tensor:
    """Returns what `ours`, our kernels' product, returns. The library computes the products in `equal`."""
    if not _is_equal(equal, x, packed):
        return ours(x, packed, **how)
    return cublas_linear(x, weight_of_numbers(packed, x.dtype), packed.bias, whole_rows=packed.whole_rows, **how)


def gated_linear_with_cublas(
    ours: Callable[..., Tensor], equal: frozenset[Product], x: Tensor, packed: PackedLinear, activation: Activation
) -> Tensor:
    """Does the same as `linear_with_cublas` for the stacked weights of gate and up."""
    if not _is_equal(equal, x, packed):
        return ours(x, packed, activation)
    weight = weight_of_numbers(packed, x.dtype)
    return act_and_mul(cublas_linear(x, weight, packed.bias, whole_rows=packed.whole_rows), activation)

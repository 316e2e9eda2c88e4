"""Triton kernel that turns a weight of four or eight bits into a tensor, for products of the vendor's library.

The numbers have the bits that the kernels of triton_low_bit.py multiply. By the bytes that are read and written, the
largest weight of a layer takes an H200 about 0.1 ms. So this pays only for thousands of rows (cublas.py).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.linear.packed_codes import ROWS, STEP, PackedCodes
from worker.ops.linear.triton_dequantize import Format
from worker.ops.linear.triton_low_bit import code_offsets, load_part, load_words, operands, row_words


@triton.jit
def _unpack_kernel(
    codes_ptr, scale_ptr, minimum_ptr, table_ptr, out_ptr, columns, depth, weight_rows,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores BLOCK_N rows of a weight, STEP inputs of each. weight_rows: see _quantized_linear_kernel"""
    first_n, at = tl.program_id(0).to(tl.int64) * BLOCK_N, tl.program_id(1) * STEP
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    mask_n = n < columns - first_n
    codes_ptrs = codes_ptr + first_n * row_words(depth, FORMAT) + code_offsets(n, depth, FORMAT)
    scale_ptrs, minimum_ptrs = scale_ptr + first_n + n, minimum_ptr + first_n + n
    out_ptrs = out_ptr + (first_n + n)[:, None] * depth + k[None, :]
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    for block in tl.static_range(blocks):
        words = load_words(codes_ptrs, at, mask_n, FORMAT, False, block)
        for part in tl.static_range(parts):
            first = at + (block * parts + part) * FORMAT.part_inputs
            weight = load_part(
                words, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask_n, out_ptr.dtype.element_ty,
                FORMAT, False, block, part,
            )  # fmt: skip
            tl.store(out_ptrs + first, weight, mask=mask_n[:, None] & (first + k < depth)[None, :])


def unpack_triton(parts: Sequence[PackedCodes], dtype: torch.dtype) -> Tensor:
    """Returns the weight [N, K] in `dtype`, whose rows are the rows of `parts`, one part after another.

    No part may have an input order.
    """
    assert all(part.input_order is None for part in parts)
    depth = parts[0].shape[1]
    out = torch.empty(sum(part.shape[0] for part in parts), depth, dtype=dtype, device=parts[0].codes.device)
    begin = 0
    for part in parts:
        rows = part.shape[0]
        _unpack_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(depth, STEP))](
            *operands(part), out[begin:], rows, depth, part.padded_rows,
            FORMAT=Format.of(part, dtype), BLOCK_N=ROWS, STEP=STEP, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        begin += rows
    return out

"""Functions for kernels that multiply by weights with a scale per group: they compute one chain over K for a tile.

Chains advance along K as in chains.py. EVEN: no tile crosses an edge of the weight's rows. EVEN_K: K is a multiple of
STEP. Otherwise, words and scales are padded to a multiple of STEP, and only the activations of the tokens end at K.
"""

import triton
import triton.language as tl

from worker.kernels.gpu.launch.dependent_launch import prefetch_to_l2
from worker.kernels.gpu.products.chains import load_tokens
from worker.kernels.gpu.products.dequantize import dequantize, widen_half
from worker.kernels.gpu.products.packed_codes import ROWS, STEP

_STEP, _ROWS = tl.constexpr(STEP), tl.constexpr(ROWS)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=mask, other=0)


@triton.jit
def load_words(codes_ptrs, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Loads words [N, part_inputs]. Several blocks of words together encode the STEP inputs from `at` on; this is block
    BLOCK.
    """
    size: tl.constexpr = _ROWS * FORMAT.part_inputs
    return _load(codes_ptrs + (at // _STEP * FORMAT.blocks + BLOCK) * size, mask[:, None], EVEN)


@triton.jit
def _load_inputs(
    x_ptrs, at, mask, depth, FORMAT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Loads the tokens' activations [part_inputs, M] that are multiplied by part PART of block BLOCK."""
    first: tl.constexpr = (BLOCK * FORMAT.parts + PART) * FORMAT.part_inputs
    return load_tokens(x_ptrs + at + first, mask, at + first + tl.arange(0, FORMAT.part_inputs), depth, EVEN_K)


@triton.jit
def _load_scale(
    scale_ptrs, minimum_ptrs, at, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Loads scale and minimum [N] of part PART of block BLOCK, in the form that `dequantize` needs.

    at: a multiple of STEP. PackedCodes describes the words. A word with the scales of two groups is turned into a word
    that has the scale of one group twice. The two groups compute the address of the word by the same expression, so the
    word is loaded only once. Shifts are constants, because otherwise the compiler passes the weights through shared
    memory.
    """
    first: tl.constexpr = (BLOCK * FORMAT.parts + PART) * FORMAT.part_inputs
    size: tl.constexpr = FORMAT.group_size
    narrow: tl.constexpr = FORMAT.narrow
    inputs: tl.constexpr = size * 2 if FORMAT.pairs else size
    group = 0 if size == 0 else at // inputs + first // inputs
    word = _load(scale_ptrs + group * weight_rows, mask, EVEN)
    if narrow == "":
        scale = word
        minimum = _load(minimum_ptrs + group * weight_rows, mask, EVEN) if FORMAT.has_minimum else word
    elif FORMAT.has_minimum:
        scale, minimum = widen_half(word, narrow), widen_half(word >> 16, narrow)
    else:
        if FORMAT.pairs:
            upper: tl.constexpr = first // size % 2 == 1
            word = (word & -65536) | ((word >> 16) & 0xFFFF) if upper else (word & 0xFFFF) | (word << 16)
        scale = word if FORMAT.exact else widen_half(word, narrow)
        minimum = scale
    return scale, minimum


@triton.jit
def load_part(
    words, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask, dtype: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns the weights [N, part_inputs] in `dtype` of part PART of the words of block BLOCK."""
    scale, minimum = _load_scale(scale_ptrs, minimum_ptrs, at, weight_rows, mask, FORMAT, EVEN, BLOCK, PART)
    return dequantize(words, scale, minimum, table_ptr, dtype, FORMAT, PART)


@triton.jit
def _accumulate(
    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns acc [N, M] + weight [N, part_inputs] @ x [part_inputs, M] for part PART of the words of block BLOCK."""
    weight = load_part(
        words, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask, x.dtype, FORMAT, EVEN, BLOCK, PART
    )
    return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def accumulate_chain(
    codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, mask_n, mask_m, begin, end, depth, weight_rows,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the chain over K = begin .. end - 1, starting from zero, [N, M] float32. begin: a multiple of STEP"""
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(begin, end, _STEP):
        for block in tl.static_range(blocks):
            words = load_words(codes_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN_K, block, part)
                acc = _accumulate(
                    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    return acc


@triton.jit
def accumulate_gated_chain(
    gate_ptrs, up_ptrs, gate_scale, gate_minimum, columns, table_ptr, x_ptrs, mask_n, mask_m, depth, weight_rows,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the chains of gate and up over all of K. Returns the two chains, each [N, M] float32.

    columns: how many rows of the weight belong to gate; the rows of up follow
    """
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    up_scale, up_minimum = gate_scale + columns, gate_minimum + columns
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(0, depth, _STEP):
        for block in tl.static_range(blocks):
            gate_words = load_words(gate_ptrs, at, mask_n, FORMAT, EVEN, block)
            up_words = load_words(up_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN_K, block, part)
                gate = _accumulate(
                    gate, gate_words, x, at, gate_scale, gate_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
                up = _accumulate(
                    up, up_words, x, at, up_scale, up_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    return gate, up


@triton.jit
def code_offsets(n, depth, FORMAT: tl.constexpr):
    """Returns the offsets [N, part_inputs] of the first words of rows n [N]."""
    size: tl.constexpr = _ROWS * FORMAT.part_inputs
    row = n // _ROWS * (tl.cdiv(depth, _STEP) * FORMAT.blocks * size) + n % _ROWS * FORMAT.part_inputs
    return row[:, None] + tl.arange(0, FORMAT.part_inputs)[None, :]


@triton.jit
def row_words(depth, FORMAT: tl.constexpr):
    """Returns how many words encode a row of the weight."""
    return tl.cdiv(depth, _STEP) * FORMAT.blocks * FORMAT.part_inputs


@triton.jit
def prefetch_codes(
    codes_ptr, first_n, begin, end, depth, weight_rows, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Starts to load words of a tile's rows into the L2 cache: the first BYTES bytes for K = begin .. end - 1."""
    if BYTES:
        run = row_words(depth, FORMAT) * _ROWS
        step: tl.constexpr = FORMAT.blocks * FORMAT.part_inputs * _ROWS
        first = first_n // _ROWS * run + begin // _STEP * step
        runs = tl.cdiv(weight_rows - first_n, _ROWS)
        prefetch_to_l2(codes_ptr + first, run, runs, tl.cdiv(end - begin, _STEP) * step, BLOCK_N // _ROWS, BYTES)

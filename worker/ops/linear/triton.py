"""Triton kernels for linear: matrix products in which the bits of a row do not depend on the other rows.

In this file, a product is a matrix product.

The bits are batch-invariant for the following reasons. K is split at absolute positions into chains (triton_tiles.py).
For each output element, every chain is one fp32 accumulation from zero, and the chains are added in order (the bias
after the first chain). The division of work never affects the bits: one program may compute all chains of its tile; or
each chain has its own program, and the kernel that reads the result adds the partial sums
(worker/ops/norm/reference.py). Inside a chain, K advances by the tensor core's step (16 for 16-bit numbers) for any
BLOCK_K, zeros beyond the end add nothing, and the same instruction runs throughout. The weight's rows are always the
instruction's M side, 64 per warp group. The tokens are the N side: an instruction has 8 to 256 tokens, and no token
affects another token. So tiles may depend on the number of tokens, but chains must not. All of this relies on one
assumption about the hardware: wgmma m64nNk16 (k32 for e4m3) gives an element the same bits for every N.

Textbooks put the tokens on the M side. Here the weights are on the M side, because with few tokens, a product takes as
long as reading the weights. To read them at full speed, an H200 needs about 3 MB in flight, or 24 KB per
multiprocessor. Here 64 rows of 64 weights are 8 KB per stage, at least six of eight stages are ahead, and two programs
share a multiprocessor. If the tokens were on the M side, 64 rows of mostly missing tokens would take shared memory and
its bandwidth from the weights. The M side may also come from registers: eight-bit weights (quantized_weight.py) are
converted in registers, and each chain is multiplied by the scale of its weight row before it is added.

If the tokens have eight bits too, K advances by 32, and each chain is also multiplied by the scales of its tokens. Sums
of int8 are exact. The tensor core keeps sums of e4m3 to about 14 bits only. So for e4m3, the tensor core starts from
zero in each BLOCK_K, which is then always 128, and its sums are added in float32. These sums, too, begin at absolute
positions, because the length of a chain is a multiple of BLOCK_K. This needs twice the registers, hence smaller tiles,
and the tensor cores idle while a warp group adds. Triton's `max_num_imprecise_acc` would do the same, but it reads the
sums before it waits for them, and then the assembler waits for each instruction.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.activation.triton import act_times_up
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.triton_accumulate import (
    accumulate_chain,
    accumulate_gated_chain,
    apply_scales,
    launch_spilled,
    load_bias,
    load_scales,
    tile_index,
)
from worker.ops.linear.triton_tiles import Tile, cdiv
from worker.ops.triton_common import (
    FORMAT_CODES,
    launch_dependents,
    prefetch_to_l2,
    product_options,
    quantize_tokens_triton,
    wait_for_kernels,
)
from worker.spec import ACTIVATIONS


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, rows, columns, depth, chain, x_stride,
    BIAS: tl.constexpr, MULTIPLE_CHAINS: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes x @ weight.T. Each program multiplies BLOCK_M tokens by BLOCK_N weight rows.

    MULTIPLE_CHAINS: true if K has several chains
    WRITE_PARTIALS: if true, a program computes only chain program_id(1), and stores it as float32 in out[program_id(1)]
    PREFETCH: how many bytes of weights a program loads into the L2 cache before it waits for x
    """
    launch_dependents(PDL)
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    # indices within the tile, so 32 bits suffice
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    weight_ptrs = weight_ptr + first_n * depth + n[:, None] * depth + k[None, :]
    part = tl.program_id(1)
    begin = part * chain
    end = min(begin + chain, depth) if MULTIPLE_CHAINS else depth
    prefetch_to_l2(weight_ptr + first_n * depth + begin, depth, columns - first_n, end - begin, BLOCK_N, PREFETCH)
    wait_for_kernels(PDL)
    scale = load_scales(scale_ptr + first_n, n, mask_n, FORMAT or DYNAMIC)
    token_scale = load_scales(token_scale_ptr + first_m, m, mask_m, DYNAMIC)
    acc = accumulate_chain(
        weight_ptrs, x_ptrs, mask_n, mask_m, begin, end, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # BIAS is a constant, `part` is not
        if part == 0:
            acc += load_bias(bias_ptr + first_n, n, mask_n)
    if MULTIPLE_CHAINS and not WRITE_PARTIALS:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            acc += accumulate_chain(
                weight_ptrs, x_ptrs, mask_n, mask_m, begin, end, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    out_ptrs = out_ptr + (part * rows + first_m) * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def _gated_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes act(x @ gate) * (x @ up), rounded as in worker/ops/activation/triton.py.

    The weight has `columns` rows of gate, then as many rows of up.
    """
    launch_dependents(PDL)
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    # indices within the tile, so 32 bits suffice
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    gate_ptrs = weight_ptr + first_n * depth + n[:, None] * depth + k[None, :]
    up_ptrs = gate_ptrs + columns.to(tl.int64) * depth
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PREFETCH:
        for first in tl.static_range(2):
            half = weight_ptr + (first_n + first * columns) * depth
            prefetch_to_l2(half, depth, columns - first_n, depth, BLOCK_N, PREFETCH // 2)
    wait_for_kernels(PDL)
    gate, up = accumulate_gated_chain(
        gate_ptrs, up_ptrs, x_ptrs, mask_n, mask_m, depth, EVEN, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K
    )
    token_scale = load_scales(token_scale_ptr + first_m, m, mask_m, DYNAMIC)
    gate_scale = load_scales(scale_ptr + first_n, n, mask_n, FORMAT or DYNAMIC)
    up_scale = load_scales(scale_ptr + columns + first_n, n, mask_n, FORMAT or DYNAMIC)
    gate = apply_scales(gate, gate_scale, token_scale, FORMAT, DYNAMIC)
    up = apply_scales(up, up_scale, token_scale, FORMAT, DYNAMIC)
    if BIAS:
        gate += load_bias(bias_ptr + first_n, n, mask_n)
        up += load_bias(bias_ptr + columns + first_n, n, mask_n)
    out_ptrs = out_ptr + first_m * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_ptrs, act_times_up(gate.to(dtype), up.to(dtype), ACTIVATION), mask=mask_n[:, None] & mask_m[None, :])


def linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    *,
    dynamic: bool = False,
    fp32_out: bool = False,
    split_k: bool = False,
    whole_rows: int = 0,
    options: GpuOptions = NO_OPTIONS,
    tile: Tile | None = None,
) -> Tensor:
    """Returns x [T, K] @ weight [N, K].T + bias [N], [T, N] in x's dtype, or in float32 if `fp32_out`.

    scale [N]: given if the weight is int8 or float8_e4m3fn
    dynamic: if true, tokens are quantized to the weight's format, too
    split_k: if true, the result may be partial sums [S, T, N] float32 instead (worker/ops/norm/reference.py)
    whole_rows: see PackedLinear
    tile: for measurements, a tile that replaces the chosen one
    """
    columns, dtype = weight.shape[0], torch.float32 if fp32_out else x.dtype
    rows, depth = _check(x, weight, bias, scale, columns)
    device = tiles.kind_of(x.device, plain=scale is None)
    x, token_scale = quantize_tokens_triton(x, weight.dtype) if dynamic else (x, None)
    chain = tiles.chain_length(whole_rows or columns, depth)
    chains = cdiv(depth, chain)
    tile = tile or tiles.choose_tile(rows, columns, depth, x.dtype, device, split_k=split_k)
    count = tile.count(rows, columns)
    use_split_k = split_k and chains > 1 and tiles.needs_split_k(rows, count, tile)
    shape, dtype = ((chains, rows, columns), torch.float32) if use_split_k else ((rows, columns), dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    operands = x, kernel_view(weight, dynamic), *(x if one is None else one for one in (bias, scale, token_scale))
    constants: dict[str, Any] = {
        "BIAS": bias is not None, "num_warps": tile.warps, "enable_fp_fusion": False,
        "num_stages": tiles.stages_that_fit(tile, tile.columns, x, weight),
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    }  # fmt: skip
    if tile.chains == "spilled" and chains > 1:
        launch_spilled(tile, count, operands, out, (rows, columns, depth, chain, x.stride(0)), constants)
        return out
    _linear_kernel[(count, chains if use_split_k else 1)](
        *operands, out, rows, columns, depth, chain, x.stride(0),
        MULTIPLE_CHAINS=chains > 1, WRITE_PARTIALS=use_split_k, **constants, **product_options(options, tile.rows),
    )  # fmt: skip
    return out


def gated_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    scale: Tensor | None = None,
    *,
    dynamic: bool = False,
    whole_rows: int = 0,
    options: GpuOptions = NO_OPTIONS,
    tile: Tile | None = None,
) -> Tensor:
    """Returns act(x @ gate) * (x @ up), [T, I], for x [T, K], weight [2 I, K] and bias and scale [2 I].

    The weight has the rows of gate first, then the rows of up. All of K must be one chain (see the top of this file).
    Both products have the same bits as with `linear_triton`. whole_rows: see PackedLinear.
    """
    columns = weight.shape[0] // 2
    rows, depth = _check(x, weight, bias, scale, 2 * columns)
    assert tiles.is_single_chain(weight, whole_rows) and activation in ACTIVATIONS
    device = tiles.kind_of(x.device, plain=scale is None)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    x, token_scale = quantize_tokens_triton(x, weight.dtype) if dynamic else (x, None)
    tile = tile or tiles.choose_gated_tile(rows, columns, depth, x.dtype, device)
    _gated_linear_kernel[(tile.count(rows, columns),)](
        x, kernel_view(weight, dynamic), *(x if one is None else one for one in (bias, scale, token_scale)), out,
        rows, columns, depth, x.stride(0), BIAS=bias is not None, ACTIVATION=activation,
        num_warps=tile.warps, num_stages=tiles.stages_that_fit(tile, 2 * tile.columns, x, weight),
        enable_fp_fusion=False,
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype), **product_options(options, tile.rows),
    )  # fmt: skip
    return out


def kernel_view(weight: Tensor, dynamic: bool) -> Tensor:
    """Returns the weight as kernels read it. Eight-bit weights that kernels convert to the tokens' format are viewed as
    bytes.
    """
    return weight.view(torch.int8) if weight.dtype.itemsize == 1 and not dynamic else weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, columns: int) -> tuple[int, int]:
    rows, depth = x.shape
    assert weight.shape == (columns, depth) and weight.is_contiguous()
    assert weight.dtype == x.dtype if scale is None else weight.dtype in FORMAT_CODES
    assert scale is None or (scale.shape == (columns,) and scale.is_contiguous() and scale.dtype == torch.float32)
    assert rows and (x.stride(1) == 1 or depth == 1)
    assert rows == 1 or x.stride(0) <= 1 << 23  # offsets within a tile of 256 rows fit in 32 bits
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    return rows, depth

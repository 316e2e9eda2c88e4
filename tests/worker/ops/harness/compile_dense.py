"""Compiles the kernels of dense layers in bfloat16, with the shapes of Llama-3.2-3B, Qwen3-4B and gemma-3-1b.

Checks what the interpreter cannot show: no register is spilled, products use wgmma with the same step and read 16 bytes
at a time, and the squares of a row are added in the same order, whether or not the row comes as partial sums.
"""

from typing import Any

import torch
import triton

from bench.gpu.offline.triton_offline import (
    SHARED,
    Variant,
    contracted,
    copies,
    from_zero,
    sums,
    tensor_core_steps,
    usage,
)
from worker.ops import triton_common
from worker.ops.activation import triton as act_and_mul
from worker.ops.activation import triton as activate
from worker.ops.linear import triton as linear_triton
from worker.ops.linear import triton_accumulate
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.triton_tiles import DeviceKind, Tile
from worker.ops.norm import triton as norm_triton
from worker.ops.recurrent import triton as delta_net
from worker.ops.recurrent import triton as mamba2
from worker.ops.recurrent import triton as recurrent
from worker.ops.recurrent import triton as short_conv
from worker.ops.rope import triton as qkv_rope_write
from worker.ops.rope import triton as rotary
from worker.ops.rope import triton as store_kv

X, F, I32, L, F8 = "*bf16", "*fp32", "*i32", "*i64", "*fp8e4nv"
I8, BF16, INT8, FP8 = "*i8", torch.bfloat16, torch.int8, torch.float8_e4m3fn
WIDENED = {BF16: X, INT8: I8, FP8: I8}  # dtype of weights → their type in Triton; activations are in bfloat16
DYNAMIC = {INT8: I8, FP8: F8}  # dtype of both weights and activations → their type in Triton
EXACT = {"enable_fp_fusion": False}
PRODUCTS = [  # rows, N, K, kind of output
    (1, 1152, 6912, "terms"),
    (1, 151936, 2560, "wide"),
    (32, 1152, 1024, "terms"),
    (64, 3072, 8192, "terms"),
    (64, 128256, 3072, "wide"),
    (100, 5120, 3072, "terms"),
    (8192, 3072, 8192, ""),
    (8192, 128256, 3072, ""),
    (8192, 49155, 2880, ""),
    (100, 1000, 333, ""),
]
GATED = [(1, 8192, 3072), (32, 6912, 1152), (128, 8192, 3072), (8192, 9728, 2560)]
DYNAMIC_PRODUCTS = [  # rows, N, K, kind of output: products of Llama-3.2-3B and Qwen3-4B
    (1, 3072, 8192, "terms"),
    (32, 6144, 2560, "terms"),
    (64, 2560, 9728, "terms"),
    (2048, 5120, 3072, ""),
    (8192, 16384, 3072, ""),
]
DYNAMIC_GATED = [(1, 8192, 3072), (64, 9728, 2560), (100, 8192, 3072), (2048, 9728, 2560)]
NORMS = [(3072, False, 3), (1152, True, 8)]  # size, whether there is a norm before the residual, number of terms
HEADS = [(32, 8, 128, True, False, 2), (4, 1, 256, True, True, 4)]


SPILLED = [(Tile(256, 128, 8, 4), 3072, 8192), (Tile(128, 256, 8, 4), 5120, 3072)]
ELSEWHERE = (80, 86, 89, 100, 120)  # compute capabilities of other GPUs than Hopper


def linear(
    rows: int,
    columns: int,
    depth: int,
    out: str,
    stored: torch.dtype = BF16,
    tokens: torch.dtype = BF16,
    capability: int = 90,
) -> Variant:
    chains = triton.cdiv(depth, tiles.chain_length(columns, depth))
    tile = tiles.choose_tile(rows, columns, depth, tokens, DeviceKind("", capability), split_k=out == "terms")
    constants = tiles.tile_constants(tile, columns, depth, tokens, stored)
    stages = min(tile.stages, SHARED[capability] // (128 * (tile.rows + tile.columns)))
    sizes = {"columns": columns, "depth": depth, "x_stride": depth}
    return Variant(
        linear_triton._linear_kernel, [*operands(tokens, stored), X, F, F, F if out else X] + ["i32"] * 5,
        {"BIAS": not constants["EVEN"], "MULTIPLE_CHAINS": chains > 1, "WRITE_PARTIALS": out == "terms"} | constants,
        EXACT | {"num_warps": tile.warps, "num_stages": stages if capability != 90 else tile.stages},
        ("rows", *(name for name, size in sizes.items() if size % 16)), product=depth % 16 == 0, capability=capability,
    )  # fmt: skip


def spilled(tile: Tile, columns: int, depth: int) -> Variant:
    return Variant(
        triton_accumulate._spilled_linear_kernel, [X, X, X, F, F, F, X] + ["i32"] * 5,
        {"BIAS": False} | tiles.tile_constants(tile, columns, depth, BF16),
        EXACT | {"num_warps": tile.warps, "num_stages": tile.stages}, ("rows",), product=True,
    )  # fmt: skip


def gated(rows: int, columns: int, depth: int, stored: torch.dtype = BF16, tokens: torch.dtype = BF16) -> Variant:
    tile = tiles.choose_gated_tile(rows, columns, depth, tokens)
    return Variant(
        linear_triton._gated_linear_kernel, [*operands(tokens, stored), X, F, F, X] + ["i32"] * 4,
        {"BIAS": False, "ACTIVATION": "silu"} | tiles.tile_constants(tile, columns, depth, tokens, stored),
        EXACT | {"num_warps": tile.warps, "num_stages": tile.stages}, ("rows",), product=True,
    )  # fmt: skip


def operands(tokens: torch.dtype, stored: torch.dtype) -> tuple[str, str]:
    return (X, WIDENED[stored]) if tokens == BF16 else (DYNAMIC[tokens], DYNAMIC[stored])


def widened() -> list[Variant]:
    return [
        linear(1, 3072, 8192, "terms", torch.int8), linear(8192, 16384, 3072, "", torch.float8_e4m3fn),
        gated(1, 8192, 3072, torch.float8_e4m3fn), gated(128, 8192, 3072, torch.int8),
    ]  # fmt: skip


def dynamic(format: torch.dtype) -> list[Variant]:
    return [linear(*shape, format, format) for shape in DYNAMIC_PRODUCTS] + [
        gated(*shape, format, format) for shape in DYNAMIC_GATED
    ]


def tokens(size: int, format: torch.dtype) -> Variant:
    block = triton.next_power_of_2(size)
    return Variant(
        triton_common._quantize_tokens_kernel, [X, DYNAMIC[format], F, "i32", "i32"],
        {"LARGEST_VALUE": 448.0, "BLOCK": block},
        EXACT | {"num_warps": min(block // 512, 16)},
    )  # fmt: skip


def norm(size: int, after: bool, terms: int, layer: bool = False) -> Variant:
    block = triton.next_power_of_2(size)
    return Variant(
        norm_triton._rms_norm_kernel, [F if terms > 1 else X] + [X] * 5 + ["i32"] * 3 + ["fp32"] * 2,
        {"heads": 1, "SPLIT_K": terms, "X_NORM": after, "ADD": True, "NORM": True, "OFFSET": after, "LAYER": layer,
         "BLOCK": block},
        EXACT | {"num_warps": block // 512},
    )  # fmt: skip


def heads(
    q: int,
    kv: int,
    size: int,
    normed: bool,
    offset: bool,
    terms: int,
    cache: str = X,
    last: bool = False,
    values: bool = False,
) -> Variant:
    constants: dict[str, Any] = {
        "SPLIT_K": terms,
        "NORM": normed,
        "NORM_LAST": last,
        "OFFSET": offset,
        "V_NORM": values,
        "VALUES": True,
    }
    block = triton.next_power_of_2(size)
    return Variant(
        qkv_rope_write._qkv_rope_write_kernel,
        [F if terms > 1 else X, X, X, X, F, F, L, L, X, cache, cache] + ["i32"] * 4 + ["fp32"],
        constants | {"CLAMP": cache == F8, "HEAD": size, "BLOCK_D": block,
                     "BLOCK_H": qkv_rope_write.ELEMENTS_PER_PROGRAM // block}, EXACT,
        ("q_heads", "kv_heads") if q % 16 or kv % 16 else (),
    )  # fmt: skip


SMALL = [
    heads(24, 8, 128, False, False, 2),
    heads(24, 8, 96, True, False, 1, F8),
    heads(32, 8, 128, True, False, 2, last=True),
    heads(8, 1, 512, True, False, 1, values=True),
    norm(4096, False, 3, layer=True),
    Variant(activate._activate_kernel, [X, F, X, "i32"], {"ACTIVATION": "xielu", "BLOCK": 1024}, EXACT),
    Variant(activate._activate_kernel, [X, X, X, "i32"], {"ACTIVATION": "relu2", "BLOCK": 1024}, EXACT),
    Variant(
        short_conv._short_conv_kernel, [X, F, X, I32, I32, I32, X, "i32"],
        {"TAPS": 3, "ROWS": short_conv.ROWS, "CHANNELS": short_conv.CHANNELS}, EXACT, ("channels",),
    ),
    Variant(
        rotary._rotary_kernel, [X, X, F, F, L, X, X] + ["i32"] * 4,
        {"HALF": 48, "BLOCK": 64, "Q_BLOCK": 32, "K_BLOCK": 8}, EXACT, odd=("q_heads", "k_heads"),
    ),
    Variant(
        store_kv._store_kv_kernel, [X, X, F8, F8, L, "i32", "i32"], {"CLAMP": True, "ROW": 768, "BLOCK": 1024}, EXACT,
    ),
    Variant(act_and_mul._act_and_mul_kernel, [X, X, "i32"], {"ACTIVATION": "gelu_tanh", "BLOCK": 1024}, EXACT),
    Variant(
        delta_net._advance_kernel, [X, X, F, F, F, X, F, I32, I32, I32, F, "i32", "fp32"],
        {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "PADDED_DIM": 128, "TAPS": 4,
         "BLOCK_K": 128, "BLOCK_V": recurrent.COLUMNS}, EXACT, odd=("stride",),
    ),
    Variant(
        delta_net._gated_norm_kernel, [F, X, X, X, "i32", "fp32"], {"HEADS": 32, "SIZE": 128, "BLOCK": 128},
        EXACT | {"num_warps": 1}, odd=("stride",),
    ),
    Variant(
        mamba2._scan_kernel, [X, X, F, F, F, F, F, X, F, I32, I32, I32, F, "i32"],
        {"HEADS": 48, "HEAD_DIM": 64, "GROUPS": 1, "STATE": 128, "PADDED_DIM": 64, "TAPS": 4, "BLOCK_N": 128,
         "BLOCK_P": recurrent.COLUMNS}, EXACT, odd=("stride",),
    ),
    Variant(
        mamba2._norm_gated_kernel, [F, X, X, X, "i32", "fp32"], {"GROUPS": 1, "SIZE": 3072, "BLOCK": 4096},
        EXACT, odd=("stride",),
    ),
    tokens(3072, INT8),
    tokens(9728, FP8),
]  # fmt: skip


def check() -> None:
    plain = [linear(*shape) for shape in PRODUCTS] + [gated(*shape) for shape in GATED]
    plain += [spilled(*product) for product in SPILLED]
    products(plain + widened(), "16.f32.bf16.bf16")
    products(dynamic(INT8), "32.s32.s8.s8")
    for compiled in products(dynamic(FP8), "32.f32.e4m3.e4m3"):
        assert from_zero(compiled), "float32 takes over the sum of every stage"
    for capability in ELSEWHERE:
        light(linear(100, 5120, 3072, "terms", capability=capability))
    for size, after, terms in NORMS:
        assert sums(light(norm(size, after, 1))) == sums(light(norm(size, after, terms))) != []
    for q, kv, size, normed, offset, terms in HEADS:
        whole, cut = (light(heads(q, kv, size, normed, offset, count)) for count in (1, terms))
        assert sums(whole) == sums(cut) and bool(sums(whole)) == normed
    for variant in SMALL:
        assert contracted(light(variant)) == 0, variant


def products(variants: list[Variant], wanted: str) -> list[Any]:
    """Compiles products. Asserts that all use tensor-core instructions with the wanted step along K."""
    found = [light(variant) for variant in variants]
    for variant, compiled in zip(variants, found, strict=True):
        if variant.product:  # widened weights may also be copied 8 bytes at a time
            assert copies(compiled) == ({8, 16} if variant.constants["FORMAT"] else {16}), copies(compiled)
        used = tensor_core_steps(compiled)
        assert used and all(step.startswith("m64n") for step in used)
        assert {step.partition("k")[2] for step in used} == {wanted}, used
    return found


def light(variant: Variant) -> Any:
    """Compiles a kernel. Asserts that it fits in shared memory and, except for odd depths, uses no stack."""
    compiled = variant.compiled()
    used = usage(compiled)
    print(variant.kernel.__name__, used)
    assert used.shared <= SHARED[variant.capability], (variant, used)
    assert used.stack == 0 or "depth" in variant.odd, (variant, used)
    return compiled


if __name__ == "__main__":
    check()

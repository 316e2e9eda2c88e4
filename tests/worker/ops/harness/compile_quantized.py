"""Compiles products with weights of a few bits, in bfloat16, with the shapes of Llama-3.2-3B and Qwen3-4B.

Checks what the interpreter cannot show: no register is spilled, tensor cores take the same steps as in products with
plain weights, and get weights from registers. `python -m tests.worker.ops.harness.compile_quantized [DAY]`: with a day,
half of the formats, drawn by it.
"""

import random
import sys
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.gpu.offline.triton_offline import SHARED, Variant, tensor_core_steps, through_shared_memory, usage
from worker.ops.linear import triton_low_bit
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.packed_codes import ROWS, STEP, WHOLE_ROW, PackedCodes
from worker.ops.linear.triton_tiles import Tile
from worker.ops.quantized_weight import E2M1, E4M3, INT4, INT8, IQ4_NL, NF4, CodeMap

T = TypeVar("T")
HALF, BF16 = torch.float16, torch.bfloat16
FORMATS = [  # code map, group size, 16-bit format of scales, has minimums; the comment names the source of the format
    (INT4, 128, BF16, False),  # compressed-tensors
    (INT4, 128, None, True),  # GPTQ, AWQ
    (INT4, 32, HALF, False),  # Q4_0
    (INT4, 32, HALF, True),  # Q4_1
    (INT4, 32, None, True),  # Q4_K
    (INT4, 16, None, True),  # Q2_K
    (INT8, 16, None, False),  # Q6_K
    (INT8, 32, HALF, False),  # Q8_0
    (INT8, WHOLE_ROW, None, False),
    (E4M3, WHOLE_ROW, BF16, False),
    (E2M1, 32, BF16, False),  # MXFP4
    (NF4, 64, None, False),
    (IQ4_NL, 32, HALF, False),
]
DECODE = (1, 3072, 8192)
SHAPES = [  # rows, N, K, whether the result is partial sums
    (64, 5120, 3072, True),
    (100, 5120, 3072, True),
    (8192, 16384, 3072, False),
]
GATED = [(1, 16384, 3072), (128, 16384, 3072)]
ELSEWHERE = [(1, 16384, 3072), (100, 16384, 3072)]


def weight(columns: int, depth: int, code_map: CodeMap, group: int, narrow: torch.dtype | None, minimum: bool) -> Any:
    """Returns a weight without values."""
    inputs, scale = 16 if group == 16 else 32, torch.float32 if narrow is None else torch.int32
    words = STEP * code_map.bits // 16
    shape = -(-columns // ROWS), -(-depth // STEP), words // inputs, ROWS, inputs

    def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return PackedCodes(
        (columns, depth), meta(*shape, dtype=torch.int16), meta(1, 1, dtype=scale),
        meta(1, 1) if minimum and narrow is None else None, meta(16), code_map, group, narrow, minimum, None,
    )  # fmt: skip


def variant(tile: Tile, products: int, packed: PackedCodes, split_k: bool, capability: int) -> Variant:
    kernel = triton_low_bit._quantized_linear_kernel if products == 1 else None
    x = torch.empty(1, packed.shape[1], dtype=BF16, device="meta")
    stages = min(tile.stages, SHARED[capability] // triton_low_bit.stage_bytes(tile, products, packed, x))
    options = triton_low_bit.launch_options(replace(tile, stages=max(1, stages)), products, packed, x)
    constants = {name: options.pop(name) for name in ("FORMAT", "EVEN", "EVEN_K", "BLOCK_M", "BLOCK_N", "GROUP")}
    scale = "*fp32" if packed.narrow is None else "*i32"
    pointers = ["*bf16", "*i16", scale, "*fp32" if packed.minimum is not None else scale, "*fp32", "*bf16"]
    if kernel is None:
        return Variant(
            triton_low_bit._quantized_gated_linear_kernel, [*pointers, "*bf16"] + ["i32"] * 5,
            {"BIAS": False, "ACTIVATION": "silu"} | constants, options, ("rows",), capability=capability,
        )  # fmt: skip
    chains = tiles.chain_length(*packed.shape) < packed.shape[1]
    return Variant(
        kernel, [*pointers, "*fp32" if split_k else "*bf16"] + ["i32"] * 7,
        {"BIAS": False, "MULTIPLE_CHAINS": chains, "WRITE_PARTIALS": split_k} | constants, options, ("rows",),
        capability=capability,
    )  # fmt: skip


def linear(
    rows: int, columns: int, depth: int, format: tuple[Any, ...], *, split_k: bool = False, capability: int = 90
) -> Variant:
    tile = tiles.choose_tile(rows, columns, depth, BF16, split_k=split_k)
    return variant(tile, 1, weight(columns, depth, *format), split_k, capability)


def gated(rows: int, columns: int, depth: int, format: tuple[Any, ...]) -> Variant:
    tile = tiles.choose_gated_tile(rows, columns // 2, depth, BF16)
    return variant(tile, 2, weight(columns, depth, *format), False, 90)


def check(day: str) -> None:
    """Compiles the formats that are drawn by `day`, or all."""
    for at, format in drawn([*enumerate(FORMATS)], day):
        rows, columns, depth, split_k = SHAPES[at // 2 % len(SHAPES)]
        variants = [linear(*DECODE, format, split_k=True)]
        if at % 2:
            variants.append(gated(*GATED[at // 2 % len(GATED)], format))
        else:
            variants.append(linear(rows, columns, depth, format, split_k=split_k))
        for one in variants:
            compiled = small(one)
            assert {step.partition("k")[2] for step in tensor_core_steps(compiled)} == {"16.f32.bf16.bf16"}
            assert through_shared_memory(compiled) == (format[0] in (NF4, IQ4_NL)), one
    for capability in (80, 89):
        for format in FORMATS[:7:4]:
            for shape in ELSEWHERE:
                small(linear(*shape, format, capability=capability))


def small(one: Variant) -> Any:
    """Compiles a kernel. Asserts that it uses no stack, and no more shared memory than a multiprocessor has."""
    compiled = one.compiled()
    used = usage(compiled)
    print(one.kernel.__name__, one.capability, used)
    assert used.shared <= SHARED[one.capability] and used.stack == 0, (one, used)
    return compiled


def drawn(all: list[T], day: str) -> list[T]:
    """Returns half of a list, another half each day; everything for "all"."""
    return all if day == "all" else random.Random(day).sample(all, (len(all) + 1) // 2)


if __name__ == "__main__":
    check(*sys.argv[1:] or ["all"])

"""Compiles the kernels of a decode with programmatic dependent launch.

Checks what the interpreter cannot show: every program lets the next kernel start, then waits for the kernels before it,
and only then loads data, except for the weights that products prefetch. No loop's first loads come before the wait.
"""

from dataclasses import replace
from typing import Any

import torch

from bench.gpu.offline.triton_offline import (
    Variant,
    copies,
    global_accesses,
    sums,
    tensor_core_steps,
    usage,
    waits_for_kernels_first,
)
from tests.worker.ops.harness import compile_attention as attend
from tests.worker.ops.harness import compile_dense as dense
from tests.worker.ops.harness import compile_quantized as quantized
from worker.ops.activation import triton as act_and_mul
from worker.ops.activation import triton as output_gate
from worker.ops.attention import triton as attention
from worker.ops.launch_options import GpuOptions
from worker.ops.linear import triton_fused
from worker.ops.linear import triton_tiles as tiles
from worker.ops.norm import triton as norm
from worker.ops.triton_common import product_options

OPTIONS = GpuOptions(pdl=True, weight_prefetch=True)
PREFETCHING = [
    dense.linear(1, 3072, 8192, "terms"),
    dense.linear(33, 1000, 333, ""),
    dense.gated(1, 8192, 3072),
    quantized.linear(*quantized.DECODE, quantized.FORMATS[0], split_k=True),
    quantized.gated(*quantized.GATED[0], quantized.FORMATS[0]),
]
OTHERS = [
    dense.norm(3072, False, 3),
    dense.heads(24, 8, 128, False, False, 2),
    Variant(act_and_mul._act_and_mul_kernel, ["*bf16"] * 2 + ["i32"], {"ACTIVATION": "silu", "BLOCK": 1024}),
    Variant(output_gate._output_gate_kernel, ["*bf16"] * 3 + ["i32"], {"BLOCK": 1024}),
    attend.attend(attention._split_kernel, 128, 3, 32),
    attend.combine(128),
]
FUSED = [(3072, 8192, False), (1152, 6912, True)]  # N, K, whether there is a norm before the residual
NEWER = [PREFETCHING[0], OTHERS[-2]]  # kernels that are compiled for Blackwell, too


def dependent(variant: Variant, capability: int) -> Any:
    options = product_options(OPTIONS, 16)
    launch = {"launch_pdl": options.pop("launch_pdl")}
    constants = {name: value for name, value in options.items() if name in variant.kernel.arg_names}
    return replace(
        variant, constants=variant.constants | constants, options=variant.options | launch, capability=capability
    ).compiled()


def fused(columns: int, depth: int, after: bool) -> Variant:
    """Returns a product of one row with the norm after it. after: whether there is a norm before the residual"""
    empty = torch.empty(columns, depth, dtype=torch.bfloat16, device="meta")
    tile = triton_fused.norm_tile(empty[:1], empty)
    constants = tiles.tile_constants(tile, columns, depth, torch.bfloat16)
    del constants["GROUP"]
    weight = torch.empty(columns, device="meta")
    options = norm.norm_options(columns, weight, weight if after else None, offset=after)
    launch = {name: options.pop(name) for name in ("num_warps", "enable_fp_fusion")} | {"num_stages": tile.stages}
    chains = -(-depth // tiles.chain_length(columns, depth))
    x = "*bf16"
    return Variant(
        triton_fused._linear_norm_kernel, [x, x, x, "*fp32", "*i32", x, x, x, x, x] + ["i32"] * 5 + ["fp32"] * 2,
        constants | options | {"BIAS": False, "CHAINS": chains}, launch, ("rows",),
    )  # fmt: skip


def check_fused(columns: int, depth: int, after: bool) -> None:
    """Asserts that the fused kernel multiplies and adds squares as two kernels do.

    A program must count itself as arrived only after all its stores.
    """
    made = dependent(variant := fused(columns, depth, after), 90)
    plain = dense.norm(columns, after, variant.constants["CHAINS"]).compiled()
    assert sums(made) == sums(plain) != [] and copies(made) == {16} and usage(made).stack == 0
    assert tensor_core_steps(made) == {"m64n16k16.f32.bf16.bf16"} and waits_for_kernels_first(made)
    stored, counted = made.asm["ptx"].split("atom.", maxsplit=1)
    assert stored.rindex("bar.sync") > stored.rindex("st.global") and counted.startswith("global.gpu.acq_rel.add")
    assert "ld.global.cg" in counted


def check() -> None:
    for shape in FUSED:
        check_fused(*shape)
    branch = Variant(triton_fused._prefetch_kernel, ["*bf16", "i32"], {"BYTES": triton_fused.PROGRAM_BYTES})
    assert set(global_accesses(branch.compiled())) == {"prefetch.global.L2"}
    for variant in PREFETCHING + OTHERS:
        for capability in (90, 100, 120) if variant in NEWER else (90,):
            made = dependent(variant, capability)
            assert made.metadata.launch_pdl and waits_for_kernels_first(made), (variant, capability)
            assert ("prefetch.global.L2" in made.asm["ptx"]) == (variant in PREFETCHING), variant


if __name__ == "__main__":
    check()

"""Compiles the kernels of experts in bfloat16, as the layers of Qwen3-30B-A3B and gpt-oss-20b launch them.

Launches are caught on a fake GPU during a recording, in which the host must not wait for the GPU. Checks what the
interpreter cannot show: no register is spilled, and products use wgmma with the step of `linear`'s products, copy 16
bytes at a time, and pass no weight through shared memory. Prints a line for each compilation. With a day as argument,
compiles half of them, drawn by it.
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.triton_offline import (
    SHARED,
    copies,
    from_zero,
    tensor_core_steps,
    through_shared_memory,
    usage,
)
from tests.worker.ops.harness.compile_quantized import drawn, weight
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import ROWS
from worker.ops.moe import experts
from worker.ops.moe.packed import ExpertCodes, Experts, PackedExperts
from worker.ops.quantized_weight import E2M1, INT4
from worker.spec import Activation

# by GPU: bytes per thread that may be spilled. The largest tiles are made for wgmma, which needs fewer registers
SPILLED = {80: 128, 89: 128, 90: 0}
BF16, CUDA = torch.bfloat16, torch.device("cuda:0")


@dataclass(frozen=True)
class Model:
    name: str
    count: int
    chosen: int
    hidden: int
    inner: int
    activation: Activation
    bias: bool


@dataclass(frozen=True)
class Format:
    """A format of weights.

    codes: (code map, group size, 16-bit format of scales, whether there are minimums); () for other formats
    rows: dtype of eight-bit values with a scale for each row; None for other formats
    """

    name: str
    codes: tuple[Any, ...] = ()
    rows: torch.dtype | None = None
    dynamic: bool = False


QWEN = Model("Qwen3-30B-A3B", 128, 8, 2048, 768, "silu", False)
GPT_OSS = Model("gpt-oss-20b", 32, 4, 2880, 2880, "clamped_swiglu", True)
PLAIN, INT4_128 = Format("bf16"), Format("int4, groups of 128", (INT4, 128, BF16, False))
MXFP4, Q4_K = Format("mxfp4", (E2M1, 32, BF16, False)), Format("Q4_K", (INT4, 32, None, True))
FP8, DYNAMIC = Format("fp8", rows=torch.float8_e4m3fn), Format("fp8 x fp8", rows=torch.float8_e4m3fn, dynamic=True)
FEW, ALL = (1, 8192), (1, 64, 512, 1024, 8192)  # numbers of rows of a step; ALL covers tiles of 16 … 128 rows
LAUNCHED = [
    (QWEN, PLAIN, ALL, 90), (QWEN, INT4_128, ALL, 90), (QWEN, DYNAMIC, FEW, 90),
    (QWEN, Q4_K, FEW, 90), (QWEN, FP8, FEW, 90), (GPT_OSS, PLAIN, FEW, 90), (GPT_OSS, MXFP4, ALL, 90),
    (QWEN, INT4_128, FEW, 89), (QWEN, PLAIN, FEW, 80), (GPT_OSS, MXFP4, FEW, 89), (GPT_OSS, MXFP4, FEW, 80),
]  # fmt: skip


def linear(model: Model, n: int, k: int, format: Format) -> PackedExperts:
    """Returns experts on the fake GPU, whose weights have no values."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    bias = empty(model.count, n) if model.bias else None
    if not format.codes:
        values = empty(model.count, n, k, dtype=format.rows or BF16)
        scale = empty(model.count, n, dtype=torch.float32) if format.rows else None
        return PackedExperts(values, bias, scale=scale, dynamic=format.dynamic)
    packed = weight(model.count * -(-n // ROWS) * ROWS, k, *format.codes)
    on_gpu = {
        name: torch.empty_like(part, device=CUDA)
        for name in ("codes", "scale", "minimum", "table")
        if (part := getattr(packed, name)) is not None
    }
    return PackedExperts(empty(0), bias, codes=ExpertCodes(replace(packed, **on_gpu), model.count, n))


def launched(model: Model, format: Format, rows: int, capability: int) -> list[Compilation]:
    """Returns the compilations of one step of a layer for a GPU with this compute capability."""
    with ExitStack() as stack:
        machine = stack.enter_context(gpu())
        stack.enter_context(patch.object(tiles, "shared_memory", lambda device: SHARED[capability]))
        router = PackedLinear(torch.empty(model.count, model.hidden, dtype=BF16, device=CUDA), None, True)
        gate_up = linear(model, 2 * model.inner, model.hidden, format)
        layer = Experts(router, gate_up, linear(model, model.hidden, model.inner, format))
        layer = replace(layer, loads=torch.zeros(model.count, dtype=torch.int64, device=CUDA))
        h = torch.empty(rows, model.hidden, dtype=BF16, device=CUDA)
        gate = torch.empty(rows, 1, device=CUDA)

        def run() -> None:
            found = experts(h, layer, model.chosen, model.activation, normalized=True, add=h, add_gate=gate)
            assert found.shape == h.shape and found.dtype == BF16

        run()
        first = list(machine.launches.compilations)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
        assert not machine.findings, machine.findings
        assert len(machine.launches.compilations) == len(first), "compiled inside a recording"
    return [one for one in first if one.kernel.__name__ != "_linear_kernel"]


def compiled(one: Compilation, capability: int) -> Any:
    source = ASTSource(one.kernel, one.signature, one.constants, one.attributes)
    options = {name: one.options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def constants(one: Compilation) -> dict[str, Any]:
    return {one.kernel.arg_names[path[0]]: value for path, value in one.constants.items()}


def check_product(binary: Any, one: Compilation, format: Format) -> str:
    """Checks a product for a Hopper GPU. Returns the registers and the memory that it uses."""
    steps = tensor_core_steps(binary)
    wanted = "32.f32.e4m3.e4m3" if format.dynamic else "16.f32.bf16.bf16"
    assert {step.partition("k")[2] for step in steps} == {wanted}, (one.key, steps)
    assert not through_shared_memory(binary), one.key
    assert not format.dynamic or from_zero(binary), "float32 takes over the sum of every stage"
    copied = copies(binary)
    if format.codes:
        assert 16 in copied, (one.key, copied)  # copies of scales may be smaller
    else:
        assert copied == ({8, 16} if format.rows and not format.dynamic else {16}), (one.key, copied)
    return f"wgmma {', '.join(sorted(step.partition('.')[0] for step in steps))}; copies of {sorted(copied)} bytes"


def lines(model: Model, format: Format, rows: int, capability: int, seen: set[str]) -> Iterable[str]:
    for one in launched(model, format, rows, capability):
        if f"{capability} {one.key}" in seen:
            continue
        seen.add(f"{capability} {one.key}")
        binary, fixed = compiled(one, capability), constants(one)
        used, is_product = usage(binary), "BLOCK_N" in fixed
        assert used.stack <= SPILLED[capability] and used.shared <= SHARED[capability], (one.key, used)
        tile = f"{fixed['BLOCK_M']} x {fixed['BLOCK_N']}, {one.options['num_warps']} warps" if is_product else ""
        how = check_product(binary, one, format) if is_product and capability == 90 else ""
        yield (
            f"{one.kernel.__name__} sm_{capability} | {model.name} {format.name} | {rows} rows | {tile} | "
            f"{used.registers} registers, {used.stack} bytes spilled | {used.shared / 1024:.0f} KiB | {how}"
        )


def check(day: str) -> None:
    """Compiles what is drawn by `day`, or all; always one of each kernel."""
    seen: set[str] = set()
    for model, format, steps, capability in LAUNCHED[:3] + drawn(LAUNCHED[3:], day):
        for rows in steps:
            for line in lines(model, format, rows, capability, seen):
                print(line, flush=True)


if __name__ == "__main__":
    check(*sys.argv[1:] or ["all"])

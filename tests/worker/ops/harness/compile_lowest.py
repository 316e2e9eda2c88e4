"""Compiles each kernel for a GPU that is drawn: python -m tests.worker.ops.harness.compile_lowest SEED

Runs with the lowest version of Triton that pyproject.toml allows, which refuses some code that later versions compile.
Over the days, every kernel is compiled for every generation of GPUs in DEVICES. SEED `all` compiles all of them for all
generations, and prints a table.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.offline.devices import DEVICES
from bench.gpu.offline.triton_offline import SHARED, Variant, usage
from tests.worker.ops.harness import compile_attention as attend
from tests.worker.ops.harness import compile_dense as dense
from tests.worker.ops.harness import compile_dependent as dependent
from tests.worker.ops.harness import compile_experts as of_experts
from tests.worker.ops.harness import compile_quantized as quantized
from tests.worker.ops.harness.compile_launched import first_of_each, launched
from tests.worker.ops.harness.compile_sampling import VARIANTS
from worker.ops.attention import triton as attention
from worker.ops.linear import triton_fused

PREFETCH = Variant(triton_fused._prefetch_kernel, ["*bf16", "i32"], {"BYTES": triton_fused.PROGRAM_BYTES})
FEW_STAGES = 2  # so that tiles for an H200 fit into the shared memory of every GPU


@dataclass(frozen=True)
class Kernel:
    """A kernel, and how it is compiled for a compute capability."""

    name: str
    compiled: Callable[[int], Any]


def _variant(variant: Variant) -> Kernel:
    stages = {"num_stages": FEW_STAGES} if "num_stages" in variant.options else {}

    def compiled(capability: int) -> Any:
        constants = dict(variant.constants)
        if "NESTED" in constants:  # the only constant that follows from the generation
            constants["NESTED"] = capability >= attention.NESTED_FROM
        return replace(variant, options=variant.options | stages, constants=constants, capability=capability).compiled()

    return Kernel(variant.kernel.__name__, compiled)


def kernels() -> list[Kernel]:
    """Returns every kernel once."""
    variants = [
        dense.linear(100, 5120, 3072, "terms", capability=80), dense.gated(1, 8192, 3072),
        dense.tokens(3072, dense.INT8), *dense.SMALL[5:6],
        dependent.fused(*dependent.FUSED[0]), dense.spilled(*dense.SPILLED[0]),
        quantized.linear(1, 16384, 3072, quantized.FORMATS[0], capability=80),
        quantized.gated(1, 16384, 3072, quantized.FORMATS[0]), attend.combine(96), *VARIANTS, PREFETCH,
        *(attend.attend(kernel, 64, 4, 16, gpu=89) for kernel in (attention._split_kernel, attention._prefill_kernel)),
    ]  # fmt: skip
    caught = first_of_each(launched())
    experts = {
        one.kernel.__name__: one
        for format in (of_experts.PLAIN, of_experts.INT4_128)
        for one in of_experts.launched(of_experts.QWEN, format, 64, 80)
    }

    def of(one: Any) -> Kernel:
        return Kernel(one.kernel.__name__, lambda capability: of_experts.compiled(one, capability))

    found = {kernel.name: kernel for kernel in map(_variant, variants)}
    return list((found | {one.name: one for one in map(of, [*caught, *experts.values()])}).values())


def table() -> None:
    """Prints registers, KiB of shared memory and spilled bytes of every kernel on every GPU, as Markdown."""
    print("| kernel |", *(f"sm_{capability} |" for capability in DEVICES))
    print("| --- |", *("--: |" for _ in DEVICES))
    for kernel in sorted(kernels(), key=lambda one: one.name):
        print(f"| {kernel.name} |", *(f"{cell(kernel, capability)} |" for capability in DEVICES), flush=True)


def cell(kernel: Kernel, capability: int) -> str:
    try:
        used = usage(kernel.compiled(capability))
    except Exception as error:
        return type(error).__name__
    spilled = f", {used.stack} B" if used.stack else ""
    large = " too large" if used.shared > SHARED[capability] else ""
    return f"{used.registers}, {used.shared / 1024:.0f} K{large}{spilled}"


def main(seed: str) -> None:
    if seed == "all":
        return table()
    draw = random.Random(seed)
    for kernel in kernels():
        capability = draw.choice([*DEVICES])
        used = usage(kernel.compiled(capability))
        print(kernel.name, capability, used, flush=True)
        assert used.shared <= SHARED[capability], (kernel.name, capability, used)


if __name__ == "__main__":
    main(sys.argv[1])

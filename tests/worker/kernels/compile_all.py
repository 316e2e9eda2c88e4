"""Compiles every Triton kernel for a GPU that need not be there, in the variants the launchers would ask for.

Run in a process of its own, because the tests' process has Triton in interpreter mode.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.kernels import attention_triton, gate_triton, linear_triton, norm_triton, rotary_triton, write_triton

X, F, N, L = "*bf16", "*fp32", "*i32", "*i64"
HEADS = {"HEADS": 24, "KV_HEADS": 8, "HEAD": 96}
TILES = {"PAGE": 16, "TILE": 16, "ROWS": 16, "SPLIT": 512, "BLOCK_D": 128, "BLOCK_M": 64, "BLOCK_N": 64}
NARROW = {"BIAS": True, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP": 8}
KERNELS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (attention_triton._attention_kernel, [X] * 4 + [F] * 3 + [N] * 4 + ["fp32"] + ["i32"] * 4, HEADS | TILES),
    (
        attention_triton._combine_kernel,
        [F] * 3 + [X, N, N, "fp32", "i32", "i32"],
        HEADS | {"SPLIT": 512, "BLOCK_D": 128, "BLOCK_G": 4},
    ),
    (norm_triton._norm_kernel, [X] * 5 + ["i32"] * 3 + ["fp32"], {"ADD": True, "OFFSET": False, "BLOCK": 2048}),
    (
        rotary_triton._rotary_kernel,
        [X, X, F, F, L, X, X] + ["i32"] * 4,
        {"HALF": 48, "BLOCK": 64, "Q_BLOCK": 32, "K_BLOCK": 8},
    ),
    (write_triton._write_kernel, [X] * 4 + [L, "i32", "i32"], {"ROW": 768, "BLOCK": 1024}),
    (gate_triton._gate_kernel, [X, X, "i32"], {"SILU": False, "BLOCK": 1024}),
    (linear_triton._linear_kernel, [X] * 4 + ["i32"] * 4, NARROW),
]


def main() -> None:
    for kernel, types, constants in KERNELS:
        dynamic = iter(types)
        signature = {name: "constexpr" if name in constants else next(dynamic) for name in kernel.arg_names}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__)


if __name__ == "__main__":
    main()

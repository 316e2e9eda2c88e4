"""Compiles every Triton kernel for a GPU that need not be there, in the variants the launchers would ask for.

Run in a process of its own, because the tests' process has Triton in interpreter mode.
"""

from tests.worker.kernels import compile_dense, compile_sampling
from tests.worker.kernels.offline import Variant
from worker.kernels import attention_triton

X, F, N = "*bf16", "*fp32", "*i32"
HEADS = {"HEADS": 24, "KV_HEADS": 8, "HEAD": 96}
TILES = {"PAGE": 16, "TILE": 16, "ROWS": 16, "SPLIT": 512, "BLOCK_D": 128, "BLOCK_M": 64, "BLOCK_N": 64}
ATTENTION = [
    Variant(attention_triton._attention_kernel, [X] * 4 + [F] * 3 + [N] * 4 + ["fp32"] + ["i32"] * 4, HEADS | TILES),
    Variant(
        attention_triton._combine_kernel,
        [F] * 3 + [X, N, N, "fp32", "i32", "i32"],
        HEADS | {"SPLIT": 512, "BLOCK_D": 128, "BLOCK_G": 4},
    ),
]


def main() -> None:
    for variant in ATTENTION:
        variant.compiled()
        print(variant.kernel.__name__)
    compile_dense.check()
    compile_sampling.check()


if __name__ == "__main__":
    main()

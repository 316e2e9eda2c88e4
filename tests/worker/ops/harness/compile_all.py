"""Compiles every Triton kernel for a GPU that need not be present, in the variants that the launchers use.

Runs in a process of its own, because the tests' process has Triton in interpreter mode.
"""

from tests.worker.ops.harness import (
    compile_attention,
    compile_dense,
    compile_dependent,
    compile_experts,
    compile_launched,
    compile_quantized,
    compile_sampling,
)


def main() -> None:
    compile_attention.check()
    compile_dense.check()
    compile_quantized.check()
    compile_sampling.check()
    compile_experts.check()
    compile_dependent.check()
    compile_launched.check()


if __name__ == "__main__":
    main()

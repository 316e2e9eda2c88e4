"""A constant that tells kernels whether they are compiled, or run by Triton's interpreter."""

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter cannot run inline assembly

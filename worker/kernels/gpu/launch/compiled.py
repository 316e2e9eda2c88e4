"""A constant that tells kernels whether they are compiled, or run by Triton's interpreter."""

import triton
import triton.language as tl

# false in the interpreter, which cannot run inline assembly
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

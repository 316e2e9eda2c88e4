"""Names the instruction sets for which the C library has kernels, and reads the variable that limits them.

This module imports no other module of this project, so that every command can check the variable before it starts a
process.
"""

import platform
from collections.abc import Mapping
from typing import Any

VARIABLE = "SLUICE_ISA"
OF_X86 = ("none", "avx2", "avxvnni", "avx512", "avx512bf16", "amx")  # `supports` in csrc/cpu_features.c takes an index
OF_ARM = ("none", "neon", "dotprod")
ON_ARM = platform.machine() in ("aarch64", "arm64")
TIERS = OF_ARM if ON_ARM else OF_X86

# Instruction sets that have only kernels for matrix products (AMX also for attention) → the set of all other kernels
EXTENDS = {"avxvnni": "avx2", "amx": "avx512bf16", "dotprod": "neon"}
SAME_BITS = frozenset({"avxvnni", "dotprod"})  # sets that give the same bits as the set that they extend


def highest_allowed(environment: Mapping[str, str]) -> int:
    """Returns the index in TIERS of the best instruction set that SLUICE_ISA allows. If the variable is unset or empty,
    all are allowed.

    Raises ValueError, with a sentence, for an unknown name.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return len(TIERS) - 1
    if name not in TIERS[1:]:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(TIERS[1:])}, not {name!r}")
    return TIERS.index(name)


def best_of(library: Any, allowed: int = len(TIERS) - 1) -> int:
    """Returns the index in TIERS of the processor's best instruction set; 0 if the processor has none of them.

    library: the C library (ctypes)
    allowed: the highest index that may be returned
    """
    return max((index for index in range(1, allowed + 1) if library.supports(index)), default=0)

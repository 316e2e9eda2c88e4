"""The instruction sets that the C library has kernels for, and the variable that caps them.

This module imports nothing, so that every command can check the variable before it starts a process.
"""

from collections.abc import Mapping

VARIABLE = "SLUICE_ISA"
TIERS = ("none", "avx2", "avx512", "avx512bf16", "amx")  # indexed by `tier` in csrc/cpu_features.c


def highest_allowed(environment: Mapping[str, str]) -> int:
    """Returns the index in TIERS of the best instruction set that SLUICE_ISA allows; unset or empty: all of them.

    Raises ValueError, with a sentence, for an unknown name.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return len(TIERS) - 1
    if name not in TIERS[1:]:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(TIERS[1:])}, not {name!r}")
    return TIERS.index(name)

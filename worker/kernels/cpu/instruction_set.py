"""Names the instruction sets for which the C library has kernels, says which of them this processor has and uses, and
reads the variable that limits them.

This module imports no other module of this project, so that every command can check the variable before it starts a
process.
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "SLUICE_ISA"
OF_X86 = ("none", "avx2", "avxvnni", "avx512", "avx512bf16", "amx")  # `supports` in csrc/cpu_features.c takes an index
OF_ARM = ("none", "neon", "dotprod")
ON_ARM = platform.machine() in ("aarch64", "arm64")
TIERS = OF_ARM if ON_ARM else OF_X86

# Instruction sets that have only kernels for matrix products (AMX also for attention) → the set of all other kernels
EXTENDS = {"avxvnni": "avx2", "amx": "avx512bf16", "dotprod": "neon"}
# The best instruction set of a processor → all sets whose kernels this processor may run. The kernels of AVX-512 for
# bfloat16 serve where the operating system does not permit AMX.
USES = {
    "avx2": ("avx2",),
    "avxvnni": ("avx2", "avxvnni"),
    "avx512": ("avx512",),
    "avx512bf16": ("avx512", "avx512bf16"),
    "amx": ("avx512", "avx512bf16", "amx"),
    "neon": ("neon",),
    "dotprod": ("neon", "dotprod"),
}
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
FEATURES = {  # instruction set → the features that it needs, by their names in /proc/cpuinfo
    "avx2": frozenset({"avx2", "fma"}),
    "avxvnni": frozenset({"avx2", "fma", "avx_vnni"}),
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"},
    "neon": frozenset(),
    "dotprod": frozenset({"asimddp"}),
}
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


def sets_of_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...] | None:
    """Returns the instruction sets that this processor has, in the order of TIERS; None if the system does not tell."""
    try:
        lines = [line.partition(":")[::2] for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return None
    told = next((set(value.split()) for name, value in lines if name.strip() in ("flags", "Features")), None)
    return None if told is None else tuple(one for one in TIERS[1:] if FEATURES[one] <= told)


def sets_in_use(environment: Mapping[str, str], found: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the instruction sets whose kernels a processor may run, if SLUICE_ISA allows them, in the order of TIERS.

    found: the instruction sets that the processor has; None if they are unknown
    Raises ValueError, with a sentence, if SLUICE_ISA is invalid.
    """
    allowed = TIERS[1 : highest_allowed(environment) + 1]
    if found is None:
        return allowed
    return next((USES[one] for one in reversed(allowed) if one in found), ())


def best_of(library: Any, allowed: int = len(TIERS) - 1) -> int:
    """Returns the index in TIERS of the processor's best instruction set for which the library has kernels; 0 if there
    is none.

    library: the C library (ctypes)
    allowed: the highest index that may be returned
    """
    usable = (i for i in range(1, allowed + 1) if library.supports(i) and hasattr(library, f"gemm_bf16_{TIERS[i]}"))
    return max(usable, default=0)

"""The C library's functions for this processor, or for a lower instruction set that the environment names."""

import os
import subprocess
import sys

import pytest
import torch

from worker.kernels.cpu import library

PROBE = """
import torch
from worker.kernels.cpu.library import available, multiplies_bf16, tier
print(tier(), available(torch.float32), available(torch.bfloat16), available(torch.float16), multiplies_bf16())
"""


def probe(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_library_switched_off_serves_no_dtype() -> None:
    assert probe(SLUICE_NATIVE="0") == ["none", "False", "False", "False", "False"]


@pytest.mark.skipif(library.level() < 1, reason="the C library does not run on this processor")
def test_library_at_a_lower_tier_uses_that_instruction_set() -> None:
    assert probe(SLUICE_NATIVE_TIER="1") == ["avx2", "True", "True", "False", "False"]
    assert probe(SLUICE_NATIVE_TIER="0")[0] == "none"


@pytest.mark.skipif(library.level() < 1, reason="the C library does not run on this processor")
def test_kernels_have_every_function_for_both_dtypes() -> None:
    found = library.kernels()
    assert set(found) == {torch.float32, torch.bfloat16}
    for kernels in found.values():
        assert all(callable(getattr(kernels, name)) for name in library._SIGNATURES)

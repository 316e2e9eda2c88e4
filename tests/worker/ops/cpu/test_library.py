"""The C library selects functions for this processor, or for a lower instruction set that the environment names."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from worker.ops import native as library

PROBE = """
import torch
from worker.ops.native import available, multiplies_bf16, tier
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
    assert probe(SLUICE_ISA="avx2") == ["avx2", "True", "True", "False", "False"]


def test_library_above_the_processors_tier_warns_once_and_uses_the_best(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = SimpleNamespace(supports=lambda index: index == 1, gemm_bf16_avx2=None)
    monkeypatch.setattr(library, "library", lambda: found)
    monkeypatch.setenv("SLUICE_ISA", "amx")
    library.level.cache_clear()
    try:
        assert [library.tier(), library.tier()] == ["avx2", "avx2"]
    finally:
        library.level.cache_clear()
    assert caplog.messages == ["SLUICE_ISA=amx: this processor lacks it, so avx2 is used"]


@pytest.mark.skipif(library.level() < 1, reason="the C library does not run on this processor")
def test_kernels_have_every_function_for_both_dtypes() -> None:
    found = library.kernels()
    assert set(found) == {torch.float32, torch.bfloat16}
    for kernels in found.values():
        assert all(callable(getattr(kernels, name)) for name in library._SIGNATURES)

"""SLUICE_ISA selects the instruction set of the C library."""

import pytest

from worker.kernels.cpu.instruction_set import TIERS, highest_allowed


def test_highest_allowed_without_the_variable_is_the_best() -> None:
    assert TIERS[highest_allowed({})] == TIERS[highest_allowed({"SLUICE_ISA": ""})] == "amx"


@pytest.mark.parametrize("name", TIERS[1:])
def test_highest_allowed_is_the_named_one(name: str) -> None:
    assert TIERS[highest_allowed({"SLUICE_ISA": name})] == name


@pytest.mark.parametrize("name", ["none", "AVX2", "3", "sse"])
def test_highest_allowed_refuses_an_unknown_name_and_lists_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=r"^SLUICE_ISA must be one of avx2, avxvnni, avx512, avx512bf16, amx, not"):
        highest_allowed({"SLUICE_ISA": name})

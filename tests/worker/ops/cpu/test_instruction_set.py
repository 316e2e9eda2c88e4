"""Which instruction sets a processor has and uses; SLUICE_ISA selects the instruction set of the C library."""

from pathlib import Path

import pytest

from worker.ops import native as library
from worker.ops.native_build import EXTENDS, ON_ARM, TIERS, USES, highest_allowed, sets_in_use, sets_of_processor

HASWELL = "fma sse4_2 avx f16c avx2"
ALDER_LAKE = f"{HASWELL} avx_vnni"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512bw avx512vl"
ZEN4 = f"{SKYLAKE} avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN4} avx_vnni amx_bf16 amx_tile amx_int8"


def test_highest_allowed_without_the_variable_is_the_best() -> None:
    assert TIERS[highest_allowed({})] == TIERS[highest_allowed({"SLUICE_ISA": ""})] == "amx"


@pytest.mark.parametrize("name", TIERS[1:])
def test_highest_allowed_is_the_named_one(name: str) -> None:
    assert TIERS[highest_allowed({"SLUICE_ISA": name})] == name


@pytest.mark.parametrize("name", ["none", "AVX2", "3", "sse"])
def test_highest_allowed_refuses_an_unknown_name_and_lists_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=r"^SLUICE_ISA must be one of avx2, avxvnni, avx512, avx512bf16, amx, not"):
        highest_allowed({"SLUICE_ISA": name})


def of(features: str, folder: Path) -> tuple[str, ...] | None:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: any\nflags\t\t: {features}\nbugs\t\t: none\n\n" * 2)
    return sets_of_processor(folder / "cpuinfo")


@pytest.mark.skipif(ON_ARM, reason="the features of x86-64")
@pytest.mark.parametrize(
    "features, has, uses",
    [
        ("sse4_2 avx", (), ()),
        (HASWELL, ("avx2",), ("avx2",)),
        (ALDER_LAKE, ("avx2", "avxvnni"), ("avx2", "avxvnni")),
        (SKYLAKE, ("avx2", "avx512"), ("avx512",)),
        (ZEN4, ("avx2", "avx512", "avx512bf16"), ("avx512", "avx512bf16")),
        (SAPPHIRE_RAPIDS, ("avx2", "avxvnni", "avx512", "avx512bf16", "amx"), ("avx512", "avx512bf16", "amx")),
    ],
)
def test_sets_of_processors(features: str, has: tuple[str, ...], uses: tuple[str, ...], tmp_path: Path) -> None:
    assert of(features, tmp_path) == has and sets_in_use({}, has) == uses
    assert sets_in_use({"SLUICE_ISA": "avx2"}, has) == (("avx2",) if has else ())


def test_unknown_processor_gets_every_set_that_is_allowed(tmp_path: Path) -> None:
    assert sets_of_processor(tmp_path / "missing") is None
    (tmp_path / "cpuinfo").write_text("cpu : unknown\n")
    assert sets_of_processor(tmp_path / "cpuinfo") is None
    assert sets_in_use({}, None) == TIERS[1:]
    assert sets_in_use({"SLUICE_ISA": TIERS[1]}, None) == TIERS[1:2]


def test_a_processor_may_run_the_sets_that_its_best_one_extends() -> None:
    for best, uses in USES.items():
        assert uses[-1] == best and EXTENDS.get(best, best) in uses
        assert list(uses) == sorted(uses, key=(TIERS if best in TIERS else list(USES)).index)


@pytest.mark.skipif(not library.level(), reason="the C library does not run here")
def test_processor_is_recognized_as_the_library_does() -> None:
    """Systems may refuse AMX to a process; the library asks, and the list of features does not say so."""
    found = library.library()
    supported = [one for index, one in enumerate(TIERS) if index and found.supports(index)]
    assert [one for one in sets_of_processor() or () if one != "amx" or "amx" in supported] == supported

"""The parts of the three commands together measure all sections, and name only existing files and sections."""

from pathlib import Path

from bench.gpu.calls.parts import CALLS, GRACE_S, PARTS, parts_for
from bench.gpu.calls.runner import MINUTES, PACKING_S
from bench.gpu.sections import CHECKS, KERNELS, SECTIONS

ROOT = Path(__file__).parents[4]
WITH_A_FLAG = {"trace"}  # sections that are measured only with a flag
ALWAYS = {"floors"}  # measured in every part that reports shares of them


def test_parts_measure_every_section_and_every_check_once_for_the_first_model() -> None:
    parts = [part for part in PARTS if not part.others]
    measured = [section for part in parts if not part.checks for section in part.sections]
    assert sorted(measured) == sorted({section.name for section in SECTIONS} - WITH_A_FLAG - ALWAYS - {"correct"})
    assert sorted(name for part in parts for name in part.checks) == sorted((*KERNELS, *CHECKS))


def test_parts_name_existing_tests() -> None:
    paths = [path for part in PARTS for path in (*part.tests, *part.words) if path.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_limits_of_a_command_fit_its_time_and_leave_the_bench_time_to_end_by_itself() -> None:
    assert all(part.cap_s > GRACE_S and part.need_s < part.cap_s for part in PARTS)
    for call in CALLS:
        parts = parts_for(call, ("tiny", "qwen3-4b"))
        beside = max((part.cap_s for part in parts if part.beside), default=0.0)
        needed = sum(part.need_s for part in parts if not part.beside)
        assert beside + needed < 60 * MINUTES - PACKING_S, call


def test_one_model_has_no_part_for_others() -> None:
    assert "steps-of-others" not in [part.name for part in parts_for("checks", ("tiny",))]
    (others,) = [part for part in parts_for("checks", ("tiny", "qwen3-4b")) if part.name == "steps-of-others"]
    command = others.command(Path("out"), "cuda", ("tiny", "qwen3-4b"), 60)
    assert command[command.index("--models") + 1] == "qwen3-4b"

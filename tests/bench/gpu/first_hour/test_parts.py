"""The parts of the first hour on a GPU together measure all sections, and name only existing files and sections."""

from pathlib import Path

from bench.gpu.first_hour.parts import GRACE_S, PARTS, parts_for
from bench.gpu.sections import SECTIONS

ROOT = Path(__file__).parents[4]
WITH_A_FLAG = {"trace"}  # sections that are measured only with a flag


def test_parts_measure_every_section_once_for_the_first_model() -> None:
    measured = [section for part in PARTS if not part.others for section in part.sections]
    assert sorted(measured) == sorted({section.name for section in SECTIONS} - WITH_A_FLAG)


def test_parts_name_existing_tests() -> None:
    paths = [word for part in PARTS for word in part.words if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_parts_limits_leave_the_bench_time_to_end_by_itself() -> None:
    assert all(part.cap_s > GRACE_S and part.need_s < part.cap_s for part in PARTS)
    assert sum(part.cap_s for part in PARTS) < 75 * 60


def test_one_model_has_no_part_for_others() -> None:
    assert not any(part.others for part in parts_for(("tiny",)))
    (others,) = [part for part in parts_for(("tiny", "qwen3-4b")) if part.others]
    assert others.command(Path("out"), "cuda", ("tiny", "qwen3-4b"), 60)[4:6] == ["--models", "qwen3-4b"]

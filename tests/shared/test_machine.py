"""Facts about this machine."""

import os

import pytest

from shared.machine import available_bytes, usable_cores, visible_gpus


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [("", []), ("0", ["0"]), ("GPU-a, 1", ["GPU-a", "1"]), ("-1", []), ("2,-1,0", ["2"]), ("1,,0", ["1"])],
)
def test_visible_gpus_reads_the_variable_as_cuda_does(
    variable: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == gpus


def test_usable_cores_follow_the_affinity() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0)) > 0


def test_available_bytes_are_less_than_the_machine_has() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

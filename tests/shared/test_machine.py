"""The GPUs, cores and memory that a process may use, as shared/machine.py finds them."""

import os
from pathlib import Path

import pytest

from shared.machine import Memory, available_bytes, memory, usable_cores, visible_gpus

GIB = 1 << 30


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


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Memory:
    """Makes the files of a machine with 64 GiB, of which 48 GiB are available. cgroup: a line of /proc/self/cgroup"""
    meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\nSwapFree: {2 << 20} kB\n"
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": f"9:cpu:/x\n{cgroup}\n"} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return memory(root)


def group(folder: str, limit: str, used: str) -> dict[str, str]:
    version2 = {"memory.max": limit, "memory.current": used, "memory.stat": f"inactive_file {GIB}\nactive_file {GIB}\n"}
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in version2.items()}


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    whole = Memory(64 * GIB, 48 * GIB, 2 * GIB)
    assert machine(tmp_path, "0::/", {}) == whole
    assert machine(tmp_path, "0::/a.slice", group("a.slice/", "max", str(GIB))) == whole
    assert machine(tmp_path, "0::/", group("", str(100 * GIB), str(GIB))) == whole


def test_cache_of_files_of_a_limited_group_counts_as_available(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/", group("", str(16 * GIB), str(15 * GIB))) == Memory(16 * GIB, 3 * GIB, 2 * GIB)


def test_the_least_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    files = group("a.slice/b.service/", str(30 * GIB), str(4 * GIB)) | group("a.slice/", str(20 * GIB), str(12 * GIB))
    assert machine(tmp_path, "0::/a.slice/b.service", files) == Memory(20 * GIB, 10 * GIB, 2 * GIB)


def test_first_version_of_control_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": str(8 * GIB), f"{folder}/memory.usage_in_bytes": str(6 * GIB),
        f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    }  # fmt: skip
    assert machine(tmp_path, "4:memory:/docker/0123", files) == Memory(8 * GIB, 3 * GIB, 2 * GIB)

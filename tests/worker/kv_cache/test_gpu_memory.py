"""Reading a GPU's memory, with the functions of torch.cuda replaced by counters."""

from dataclasses import dataclass

import pytest
import torch

from worker.kv_cache.sizing import GpuMemory, GpuMemoryReader

DEVICE = torch.device("cuda:0")


@dataclass
class FakeCuda:
    """A fake device of 100 bytes, with an allocator that reserves and frees bytes."""

    used: int = 30
    reserved: int = 0
    cached: int = 0
    peak: int = 0

    def reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)

    def free(self, nbytes: int) -> None:
        """Frees bytes. As with torch, freed bytes stay reserved until empty_cache()."""
        self.cached += nbytes

    def empty_cache(self) -> None:
        self.reserved, self.cached = self.reserved - self.cached, 0

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.reserved


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, function in {
        "get_device_name": lambda device: "Fake GPU",
        "mem_get_info": lambda device: (100 - fake.used - fake.reserved, 100),
        "memory_reserved": lambda device: fake.reserved,
        "max_memory_reserved": lambda device: fake.peak,
        "reset_peak_memory_stats": fake.reset_peak,
        "empty_cache": fake.empty_cache,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return fake


def test_read_counts_memory_that_is_only_cached_as_free(cuda: FakeCuda) -> None:
    reader = GpuMemoryReader(DEVICE, 0.9)
    cuda.reserve(20)
    cuda.free(15)
    assert reader.read() == GpuMemory("Fake GPU", free=65, total=100, utilization=0.9)


def test_measured_growth_is_the_peak_since_the_start_of_the_measurement(cuda: FakeCuda) -> None:
    reader = GpuMemoryReader(DEVICE, 0.9)
    cuda.reserve(50)
    cuda.free(40)
    reader.start_measurement()
    cuda.reserve(7)
    cuda.free(7)
    cuda.reserve(5)
    assert reader.measured_growth() == 12
    reader.start_measurement()
    assert reader.measured_growth() == 0

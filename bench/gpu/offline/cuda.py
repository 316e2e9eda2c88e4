"""Replaces torch.cuda and other parts of PyTorch, so that the process behaves as if it had a GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from bench.gpu.offline.devices import DEVICES
from bench.gpu.offline.dispatch import Dispatch
from bench.gpu.offline.launches import Launches
from bench.gpu.offline.machine import Machine

GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
TO = Tensor.to


class Generator(torch.Generator):
    """A host generator whose `device` is the fake GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def manual_seed(self, seed: int) -> "Generator":
        super().manual_seed(seed)
        return self


def events(machine: Machine) -> type:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = -1

        def record(self) -> None:
            self.at = machine.operations
            if machine.recording:
                machine.find("an event inside a recording")

        def synchronize(self) -> None:
            if self.at >= 0:
                machine.wait("an event", self.at)

        def elapsed_time(self, other: "Event") -> float:
            return 1000.0 if other.at >= self.at >= 0 else -1.0

    return Event


class Graph:
    def __init__(self) -> None:
        self.operations = 0
        self.given: list[StorageWeakRef] = []

    def replay(self) -> None:
        machine = self.machine
        assert self.operations, "replayed before it was recorded"
        if gone := sum(memory.expired() for memory in self.given):  # type: ignore[no-untyped-call]
            machine.find(f"a replay uses {gone} of {len(self.given)} tensors after their end")
        machine.replays += 1
        machine.operations += 1

    machine: Machine


def recordings(machine: Machine) -> type:
    class Recording:  # a class, as torch.cuda.graph
        def __init__(self, graph: Graph, pool: object = None, capture_error_mode: str = "global") -> None:
            self._recording = _recorded(machine, graph, capture_error_mode)

        def __enter__(self) -> None:
            self._recording.__enter__()

        def __exit__(self, *error: Any) -> bool | None:
            return self._recording.__exit__(*error)

    return Recording


@contextmanager
def _recorded(machine: Machine, graph: Graph, capture_error_mode: str) -> Iterator[None]:
    assert not machine.recording and capture_error_mode in ("global", "thread_local", "relaxed")
    machine.wait("the beginning of a recording")
    begun = machine.operations
    machine.record(True)
    try:
        yield
        graph.given = list(machine.given.values())
    finally:
        machine.record(False)
    graph.operations = machine.operations - begun + machine.launches.count
    machine.recordings += 1


def _cuda(machine: Machine) -> dict[str, Any]:
    """Returns what replaces the functions and classes of torch.cuda, by name.

    A class is replaced by a class, because Python evaluates annotations such as `torch.cuda.Stream | None`.
    """
    device_, total = machine.launches.device, machine.launches.device.memory
    major, minor = device_.version
    properties = SimpleNamespace(
        name=device_.name, total_memory=total, multi_processor_count=device_.multiprocessors, major=major, minor=minor,
        L2_cache_size=device_.l2,
    )  # fmt: skip
    stream = SimpleNamespace(
        cuda_stream=0, synchronize=lambda: machine.wait("a stream"), wait_stream=lambda other: None
    )

    class Stream:
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return stream

    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
        "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (total - (1 << 30), total),
        "memory_reserved": lambda device=None: 0, "max_memory_reserved": lambda device=None: 1 << 30,
        "reset_peak_memory_stats": lambda device=None: None, "empty_cache": lambda: None,
        "synchronize": lambda device=None: machine.wait("the device"),
        "Event": events(machine), "CUDAGraph": type("CUDAGraph", (Graph,), {"machine": machine}),
        "graph": recordings(machine), "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: stream, "set_stream": lambda one: None,
        "Stream": Stream, "stream": lambda one: nullcontext(),
    }  # fmt: skip


@contextmanager
def _no_guard() -> Iterator[None]:
    """Replaces PyTorch's C++ device guard by one that does nothing, because there is no device to select."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, GUARDS)
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


@contextmanager
def gpu(capability: int = 90) -> Iterator[Machine]:
    """Inside the `with`, the process behaves as if it had a GPU of compute capability `capability` (90: Hopper).

    Raises RuntimeError on a machine with a real GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the fake GPU takes the place of PyTorch's CUDA, so it runs only on machines without CUDA")
    machine = Machine(Launches(DEVICES[capability]))
    machine.launches.find, machine.launches.uses = machine.find, machine.uses
    with ExitStack() as stack:
        stack.enter_context(_no_guard())
        for name, stand_in in _cuda(machine).items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda self: machine.pin(self.clone())))
        stack.enter_context(patch.object(Tensor, "to", _to))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", address))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))  # would start CUDA
        stack.enter_context(machine.launches.caught())
        stack.enter_context(Dispatch(machine))
        yield machine


def _to(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
    """Tensor.to that changes device "cuda" to "cuda:0", because torch would look up the current device."""
    numbered: list[Any] = [torch.device("cuda:0") if str(one) == "cuda" else one for one in args]
    return TO(tensor, *numbered, **how)


def address(tensor: Tensor) -> int:
    """Returns a unique fake address. Storages start at multiples of 512, as with PyTorch's allocator."""
    return int(tensor.untyped_storage()._cdata * 512 + tensor.storage_offset() * tensor.itemsize)

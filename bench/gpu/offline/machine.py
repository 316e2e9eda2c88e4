"""A GPU that computes nothing: every tensor on it is fake. A fake tensor has a shape, a dtype and a device, and no
numbers.

Host tensors are real. Copies between host and device are checked in the worst order that a device may have: an
asynchronous copy is assumed to end only when the host waits for it. `Machine.findings` lists what would be an error on
a real device: host memory that was changed during a copy; waits, copies and compilations inside a graph capture; and
replays that use freed memory. `Machine.waits` counts how often the host waited at each place in the code.
"""

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bench.gpu.offline.launches import Launches

POISON = 0x5A
ROOT = Path(__file__).parents[3]
OURS, NOT_OURS = ("worker/", "bench/"), "bench/gpu/offline/"


@dataclass
class Crossing:
    """An asynchronous copy for which the host has not waited yet.

    host: the host memory, which must not change until the host has waited.
    seen: for a copy to the device, the bytes in `host` at its launch; None for a copy to the host.
    """

    at: int
    host: Tensor
    seen: bytes | None
    where: str


@dataclass
class Machine:
    """Records what happened on the fake GPU. Time is counted in operations.

    launched: counts of PyTorch operations that run a kernel or a copy; `launches` counts Triton's kernels. faked_s: the
    host's seconds spent on faking operations.
    """

    launches: Launches
    findings: list[str] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    launched: Counter[str] = field(default_factory=Counter)
    faked_s: float = 0.0
    recordings: int = 0
    replays: int = 0
    recording: bool = False
    pinned: dict[int, Any] = field(default_factory=dict)
    given: dict[int, StorageWeakRef] = field(default_factory=dict)  # memory that a capture uses but did not allocate
    _made: dict[int, Any] = field(default_factory=dict)
    _crossings: list[Crossing] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, what: str) -> None:
        self.findings.append(f"{what} at {where()}")

    def wait(self, what: str, until: int | None = None) -> None:
        """Makes the host wait for all operations that were started before operation number `until`."""
        self.waits[f"{what} at {where()}"] += 1
        if self.recording:
            self.find(f"{what} inside a recording")
        self.settle(self.operations if until is None else until)

    def settle(self, until: int) -> None:
        with self._lock:
            through = [one for one in self._crossings if one.at <= until]
            self._crossings = [one for one in self._crossings if one.at > until]
        for crossing in through:
            if crossing.seen is None:
                with torch.inference_mode():
                    crossing.host.zero_()
            elif _bytes(crossing.host) != crossing.seen:
                self.findings.append(f"host memory was written under the copy at {crossing.where}")

    def to_device(self, host: Tensor, asynchronous: bool) -> None:
        if self.recording:
            return self.find("host memory is read inside a recording")
        if not asynchronous or host.untyped_storage().data_ptr() not in self.pinned:
            return self.wait("a copy to the device")
        self._crossings.append(Crossing(self.operations, host, _bytes(host), where()))

    def to_host(self, host: Tensor, asynchronous: bool) -> None:
        if self.recording:
            return self.find("host memory is written inside a recording")
        if not asynchronous or host.untyped_storage().data_ptr() not in self.pinned:
            self.wait("a copy to the host")
            host.zero_()
            return
        host.view(torch.uint8).fill_(POISON)
        self._crossings.append(Crossing(self.operations, host, None, where()))

    def uses(self, *tensors: Tensor) -> None:
        """Records that the current operation uses these tensors' memory."""
        if self.recording:
            for memory in (tensor.untyped_storage() for tensor in tensors):
                if memory._cdata not in self._made:
                    self.given[memory._cdata] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]

    def makes(self, *tensors: Tensor) -> None:
        """Records the memory that a graph capture allocates. After the capture, other tensors may use this memory."""
        if self.recording:
            for memory in (tensor.untyped_storage() for tensor in tensors):
                if memory._cdata not in self.given:
                    self._made[memory._cdata] = memory

    def record(self, whether: bool) -> None:
        self.recording = self.launches.closed = whether
        self.given, self._made = {}, {}

    def pin(self, host: Tensor) -> Tensor:
        """Pins host memory and keeps it for ever, so that no two pinned memories have the same address."""
        self.pinned[host.untyped_storage().data_ptr()] = host.untyped_storage()
        return host


def where() -> str:
    """Returns the innermost code line of worker or bench on the stack. Lines of the fake GPU are skipped."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if path.startswith(OURS) and not path.startswith(NOT_OURS):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere of ours"


def _bytes(host: Tensor) -> bytes:
    return host.numpy().tobytes()

"""Measures the time that the AMX matmul spends outside of AMX instructions, on processors without AMX.

    python -m bench.micro.amx_stand_in [OTHER_SOURCES]

Other instructions stand in for the tile instructions (amx_stand_in.h). Only ratios between two folders of C sources
(each laid out like worker/) are meaningful. The two folders alternate in one run. Times are CPU time of
one thread.
"""

import ctypes
import sys
import tempfile
import time
from ctypes import c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from worker.ops import native_build
from worker.ops.native import huge_pages

HEADER = Path(__file__).with_suffix(".h")
ROWS = (1, 8, 16, 17, 32, 40, 64, 128, 512, 1024)
WEIGHTS = 6  # number of different weights in a round: together more than a CPU cache holds


def compiled(sources: Path, room: Path) -> ctypes.CDLL:
    target = room / "stand_in.so"
    shim = ("-include", str(HEADER), *native_build.includes(sources), "-Wno-unused", "-shared")
    native_build._run(
        "gcc",
        *native_build.COMMON,
        *native_build.AMX,
        *shim,
        str(sources / "ops/linear/csrc/amx/gemm_amx.c"),
        "-o",
        str(target),
    )
    return ctypes.CDLL(str(target))


def seconds(library: ctypes.CDLL, x: Tensor, weights: list[Tensor], out: Tensor) -> float:
    """Returns the CPU seconds of one matrix product, as the mean over `weights`."""
    begin = time.thread_time()
    for weight in weights:
        pointers = (c_void_p(x.data_ptr()), c_void_p(weight.data_ptr()), None, c_void_p(out.data_ptr()))
        library.gemm_bf16_amx(*pointers, c_long(len(x)), c_long(out.shape[1]), c_long(x.shape[1]), 1, 1)
    return (time.thread_time() - begin) / len(weights)


def quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def main() -> None:
    folders = [Path(name).resolve() for name in sys.argv[1:]] + [native_build.SOURCES]
    with tempfile.TemporaryDirectory() as room:
        rooms = [Path(room) / str(i) for i in range(len(folders))]
        for one in rooms:
            one.mkdir()
        libraries = [compiled(folder, one) for folder, one in zip(folders, rooms, strict=True)]
    for n, k in ((4096, 1024), (6144, 1024), (1024, 3072)):
        weights = [huge_pages(torch.empty(n, k, dtype=torch.bfloat16)).fill_(0.01) for _ in range(WEIGHTS)]
        for t in ROWS:
            x, out = torch.ones(t, k, dtype=torch.bfloat16), torch.empty(t, n, dtype=torch.bfloat16)
            rounds = [[seconds(one, x, weights, out) for one in libraries] for _ in range(40 if t <= 64 else 14)]
            took = [quartile(list(times)) for times in zip(*rounds, strict=True)]
            ratio = f"{took[0] / took[1]:6.2f} x" if len(took) > 1 else ""
            print(f"{t:5} x {k} x {n}  " + " ".join(f"{one * 1e3:8.3f} ms" for one in took) + ratio, flush=True)


if __name__ == "__main__":
    main()

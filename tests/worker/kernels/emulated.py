"""The C library with AMX emulated: its own sources, unchanged, whose tile instructions are plain functions (amx/).

What the AMX tier means, and that it asks for nothing that a processor with AMX would refuse, can so be tested on any
with AVX-512 and bf16. Its speed cannot.
"""

import atexit
import ctypes
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from worker.kernels.cpu import build

HERE = Path(__file__).with_name("amx")
SHIM = ("-include", str(HERE / "emulated.h"), "-I", str(build.SOURCES))
# what library.py binds at this tier
UNITS = (
    *((source, (*flags, *SHIM)) for source, flags in build.UNITS if source == "cpu_features.c" or flags == build.AMX),
    *((source, flags) for source, flags in build.UNITS if source in ("gemm/pack.c", "decoder.c")),
    *((source, flags) for source, flags in build.UNITS if flags == build.AVX512 or source == "rowwise.c"),
    (str(HERE / "emulated.c"), build.AVX512BF16),
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions; and the cache lines that tile loads touched, each row's on its own."""

    configurations: int
    zeros: int
    loads: int
    stores: int
    dots: int
    lines: int


@cache
def path() -> Path:
    """Of the compiled library, made once a process; raises CalledProcessError where it does not compile."""
    room = Path(tempfile.mkdtemp(prefix="sluice-amx-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    assert compiler is not None
    with patch.object(build, "UNITS", UNITS):
        return build._compile(compiler, room)


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(path()))
    found.emulated_fault.restype = ctypes.c_char_p
    return found


def fault() -> str:
    """Why a processor would have faulted since the last look; empty: it would not."""
    return bytes(library().emulated_fault()).decode()


def counts() -> Counts:
    """Since the last look."""
    room = (ctypes.c_long * 6)()
    library().emulated_counts(room)
    return Counts(*room)

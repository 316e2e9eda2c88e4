"""Builds the C library with emulated AMX: its sources, with functions in place of tile instructions (emulated_amx.c).

So any processor with AVX-512 and bf16 can test the bits of the AMX tier, and that the tier does nothing that a
processor with AMX would reject. Emulation says nothing about speed.
"""

import atexit
import ctypes
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from worker.ops import native_build

FILES = [Path(__file__).with_suffix(suffix) for suffix in (".h", ".c")]
# The macro is read by nobody: with it, the name of an object that is kept changes with the contents of these files.
CONTENTS = hashlib.sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()[:16]
SHIM = ("-include", str(FILES[0]), *native_build.includes(native_build.SOURCES), f"-DSLUICE_EMULATOR=0x{CONTENTS}")
ROWS_ALONE = (  # sources without an AMX version
    "add_product.c",
    "text_attention.c",
    "few_rows.c",
    "norm.c",
    "activation.c",
    "rope.c",
    "combine.c",
    "delta_net.c",
    "mamba2.c",
    "short_conv.c",
)
# compiled sources that ops/native.py binds at this tier
UNITS = (
    *(
        (source, (*flags, *SHIM))
        for source, flags in native_build.UNITS
        if source == "cpu_features.c" or flags == native_build.AMX
    ),
    *(
        (source, flags)
        for source, flags in native_build.UNITS
        if flags in ((), native_build.ROUND_TWICE) and source != "cpu_features.c"
    ),
    *(
        (source, flags)
        for source, flags in native_build.UNITS
        if flags == native_build.AVX512 or (source in ROWS_ALONE and flags == native_build.AVX512BF16)
    ),
    (str(FILES[1]), (*native_build.AVX512BF16, SHIM[-1])),
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of instructions, and of cache lines that tile loads touched, counted for each row of a tile."""

    configurations: int
    zeros: int
    loads: int
    stores: int
    dots: int
    lines: int


@cache
def path() -> Path:
    """Returns the path of the library, made once per process, of objects that are compiled once for the same sources.

    Raises CalledProcessError if it does not compile.
    """
    room = Path(tempfile.mkdtemp(prefix="sluice-amx-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    assert compiler is not None
    # -O1, because compiling takes longer than the tests
    units = tuple((source, (*flags, "-O1")) for source, flags in UNITS)
    if (kept := native_build.objects_folder()) is None:
        return native_build._compile(compiler, room, units)
    with native_build._locked(native_build.LIBRARIES / ".build-lock", native_build._quietly):
        return native_build._compile(compiler, room, units, kept=kept)


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(path()))
    found.emulated_fault.restype = ctypes.c_char_p
    return found


def fault() -> str:
    """Returns why a real processor would have faulted since the last call; empty if it would not have."""
    return bytes(library().emulated_fault()).decode()


def counts() -> Counts:
    """Returns the counts since the last call."""
    room = (ctypes.c_long * 6)()
    library().emulated_counts(room)
    return Counts(*room)

"""Large freed buffers go back to the system, even if larger ones were freed before. A separate process tests it."""

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from shared.machine import LARGE_BYTES, map_large_buffers
if {mapped}:
    map_large_buffers()
libc = ctypes.CDLL(None)
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Mallinfo2, ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(ctypes.c_size_t(8 << 20)))  # glibc then keeps buffers up to this size in its arenas
before = libc.mallinfo2().hblks
held = [libc.malloc(ctypes.c_size_t(LARGE_BYTES)) for _ in range(8)]
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or newer tells what is mapped")
def test_large_buffers_are_mapped() -> None:
    mapped = [
        subprocess.run([sys.executable, "-c", SCRIPT.format(mapped=mapped)], capture_output=True, text=True, check=True)
        for mapped in (False, True)
    ]
    assert [int(run.stdout) for run in mapped] == [0, 8]

"""Freed memory stays in the process while a model is loaded, and goes back to the system afterwards."""

import json
import subprocess
import sys

SCRIPT = """
import json, mmap, resource
from pathlib import Path
import torch
from shared.machine import kept_free_memory

def load_linear():  # fills and frees the temporaries of a linear; returns the page faults
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(3)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident()
with kept_free_memory():
    faults = [load_linear() for _ in range(12)]
    kept = resident() - before
pages = 3 * (64 << 20) // mmap.PAGESIZE
print(json.dumps({"faults": faults, "kept": kept, "after": resident() - before, "pages": pages}))
"""


def test_linears_reuse_memory_until_the_end() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    pages = found["pages"]
    assert sum(found["faults"][-4:]) < pages // 2, "at first some land elsewhere, as their addresses are aligned"
    assert found["kept"] > pages // 3 and found["after"] < pages // 6

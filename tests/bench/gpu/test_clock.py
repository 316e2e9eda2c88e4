"""The clock that times kernels alone, on the fake GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# A process of its own, because the tests' process has Triton in interpreter mode and transformers imported already.
SCRIPT = """
import torch
from bench.gpu.clock import CudaClock
from bench.gpu.offline.cuda import gpu

with gpu() as machine:
    x, inside = torch.zeros(8, device="cuda"), []

    def call():
        inside.append(machine.recording)
        x.add_(1)

    seconds = CudaClock().seconds_on_device(call)
    assert seconds > 0 and machine.replays > 3 and not machine.findings, machine.findings
    assert not any(inside[:3]) and all(inside[3:]) and inside[3:], inside
    import transformers.generation.continuous_batching.utils  # evaluates annotations with classes of torch.cuda
"""


def test_kernels_are_timed_by_replays_of_a_graph_and_transformers_can_be_imported_on_the_fake_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

import os
import subprocess
import sys


def test_every_kernel_compiles_for_a_gpu_in_bf16() -> None:
    """Checks what the interpreter does not: Triton's own type checks, and that bf16 is accepted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.kernels.harness.compile_all"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert len(compiled) == 35, compiled

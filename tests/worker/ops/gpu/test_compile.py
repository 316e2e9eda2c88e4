import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LOWEST = ROOT / ".venv" / "triton-3.6"  # made by `make test FULL=1`

PARTS = {  # module of the harness → how many kernels it names
    "attention": 3, "dense": 15, "dependent": 0, "experts": 9, "launched": 14, "quantized": 2, "sampling": 6,
}  # fmt: skip
DRAWN = ("attention", "experts", "quantized")  # compile kernels for many formats or shapes, half of them a day


def compiled(*command: str, path: Path | None = None) -> set[str]:
    """Runs a module of the harness. Returns the kernels that it has compiled. path: a folder with another Triton."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), str(ROOT)])
    done = subprocess.run([sys.executable, "-m", *command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_compiles_for_a_gpu_in_bf16(part: str) -> None:
    """Checks what the interpreter does not: Triton's own type checks, and that bf16 is accepted."""
    day = [str(date.today())] if part in DRAWN else []
    assert len(compiled(f"tests.worker.ops.harness.compile_{part}", *day)) == PARTS[part]


@pytest.mark.skipif(not LOWEST.exists(), reason="make test FULL=1 fetches the lowest Triton")
def test_every_kernel_compiles_with_the_lowest_triton_for_a_gpu_that_is_drawn() -> None:
    found = compiled("tests.worker.ops.harness.compile_lowest", str(date.today()), path=LOWEST)
    assert len(found) == 40, found

import subprocess
import sys

ROOMS = "norm, rotary, store_kv, attention, act_and_mul, linear, sample"


def test_importing_kernels_on_a_cpu_does_not_import_triton() -> None:
    code = f"import sys\nfrom worker.kernels import {ROOMS}\nassert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

import subprocess
import sys

ROOMS = "norm, rotary, store_kv, attention, act_and_mul, linear, sample"


def test_a_cpu_start_does_not_pay_for_triton() -> None:
    code = f"import sys\nfrom worker.kernels import {ROOMS}\nassert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

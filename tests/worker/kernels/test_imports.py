import subprocess
import sys

import pytest

ROOMS = "norm, rotary, store_kv, attention, act_and_mul, linear, sample"


@pytest.mark.parametrize("imports", [f"from worker.kernels import {ROOMS}", "import worker.engine.load"])
def test_a_worker_on_a_cpu_does_not_import_the_triton_kernels(imports: str) -> None:
    check = "assert not {'triton', 'worker.kernels.gpu.quantize'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"import sys\n{imports}\n{check}"], check=True)

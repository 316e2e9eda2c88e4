import subprocess
import sys

import pytest

OPERATIONS = """import worker.operations
from worker.ops import activation, attention, linear, moe, norm, recurrent, rope, sampling"""


@pytest.mark.parametrize("imports", [OPERATIONS, "import worker.engine.build"])
def test_a_worker_on_a_cpu_does_not_import_the_triton_kernels(imports: str) -> None:
    check = "assert not {'triton', 'worker.ops.triton_common'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"import sys\n{imports}\n{check}"], check=True)

"""A bench that needs a package beyond those of `make run` says how to install it."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.parametrize("name, bench", [("httpx", "bench.model_switch"), ("psutil", "bench.peers.serving")])
def test_bench_without_a_package_says_how_to_install_it(name: str, bench: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; import {bench}"  # None: as if it were not installed
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"needs {name}, which `make run` does not install" in done.stderr and f"-m pip install {name}" in done.stderr

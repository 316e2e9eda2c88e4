"""`python -m bench.micro.engine` measures a real engine: the demo model."""

import json
import subprocess
import sys
from pathlib import Path

import deploy.demo
from tests.patience import PATIENCE_S

DEMO = Path(deploy.demo.__file__).parent / "model"
COMMAND = (sys.executable, "-m", "bench.micro.engine", "--model", str(DEMO), "--kv-cache-gb", "0.1")


def test_engine_answers_every_line_with_a_rate() -> None:
    done = subprocess.run(
        COMMAND, input="prefill 700\ndecode 1\ndecode 5 600\n", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    loaded, *rates = map(json.loads, done.stdout.splitlines())
    assert loaded["model"] == str(DEMO) and loaded["resident_gb"] > 0.01
    assert len(rates) == 3 and all(rate["tokens_s"] > 0.1 for rate in rates)


def test_engine_names_a_wrong_flag_in_one_line() -> None:
    done = subprocess.run([*COMMAND, "--dtype", "int3"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert done.stderr.startswith("python -m bench.micro.engine: --dtype") and len(done.stderr.splitlines()) == 1

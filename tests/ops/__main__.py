"""`python -m tests.ops [PART ...]` runs Sluice under a real Prometheus, behind a real nginx, and as Kubernetes pods.

It uses the files that deploy/ ships, and needs prometheus, promtool and nginx on the PATH. It takes about three
minutes, one of them to install the frontend's requirements. It prints its measurements; the exit code is 0 if every
check holds.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ops.load_balancer import load_balancer
from tests.ops.monitoring import monitoring
from tests.ops.pods import pods
from tests.ops.programs import DEPLOY


def rules(folder: Path) -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        subprocess.run(["promtool", *arguments], cwd=DEPLOY / "monitoring", check=True, stdout=subprocess.DEVNULL)
        print(f"promtool {' '.join(arguments)}: ok", flush=True)


PARTS = {"rules": rules, "monitoring": monitoring, "load_balancer": load_balancer, "pods": pods}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sluice-ops-") as root:
        for name in sys.argv[1:] or PARTS:
            (folder := Path(root) / name).mkdir()
            PARTS[name](folder)

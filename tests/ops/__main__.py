"""`python -m tests.ops [PART ...]`: Sluice under a real Prometheus and behind a real nginx, and its pods, on the files
that deploy/ ships.

Needs prometheus, promtool and nginx on the PATH; takes about three minutes, a third of it to install the frontend's
requirements. Prints what it found out; the exit code is 0 if all of it is as promised.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ops.balanced import balanced
from tests.ops.monitored import monitored
from tests.ops.pods import pods
from tests.ops.programs import DEPLOY


def rules(place: Path) -> None:
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        subprocess.run(["promtool", *words], cwd=DEPLOY / "monitoring", check=True, stdout=subprocess.DEVNULL)
        print(f"promtool {' '.join(words)}: ok", flush=True)


PARTS = {"rules": rules, "monitored": monitored, "balanced": balanced, "pods": pods}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sluice-ops-") as room:
        for name in sys.argv[1:] or PARTS:
            (place := Path(room) / name).mkdir()
            PARTS[name](place)

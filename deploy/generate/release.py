"""Renders deploy/kubernetes/ and deploy/gateway/pool.yaml from the Helm chart with `helm template`."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEPLOY = Path(__file__).parents[1]
CHART = DEPLOY / "helm" / "sluice"
FOLDER = DEPLOY / "kubernetes"
HEAD = (
    "# Made from deploy/helm/sluice by `python -m deploy.release`: change the chart, or this in a patch of your own.\n"
)


class NoHelm(Exception):
    """Helm is not installed."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered file: its templates, and the values that differ from the chart's defaults."""

    templates: tuple[str, ...]
    values: tuple[str, ...] = ()


FILES: Mapping[str, Rendering] = {
    "settings.yaml": Rendering(("settings",)),
    "model.yaml": Rendering(("model",)),
    "worker.yaml": Rendering(("worker",)),
    "worker-cpu.yaml": Rendering(("worker",), ("device=cpu",)),
    "frontend.yaml": Rendering(("frontend",)),
    "network.yaml": Rendering(("network",)),
    "components/keda/scaled-object.yaml": Rendering(("worker-keda",), ("workerAutoscaling.kind=keda",)),
    "components/custom-metrics/autoscaler.yaml": Rendering(("worker-hpa",), ("workerAutoscaling.kind=metrics",)),
    "components/ingress/ingress.yaml": Rendering(("ingress",), ("ingress.enabled=true",)),
    "components/gateway/route.yaml": Rendering(("gateway",), ("gatewayRoute.enabled=true",)),
    "components/monitoring/monitors.yaml": Rendering(("monitor",), ("podMonitor.enabled=true",)),
    "../gateway/pool.yaml": Rendering(
        ("settings", "model", "server", "gateway"),
        (
            "topology=all-in-one",
            "gatewayRoute.enabled=true",
            "worker.replicas=2",
            r"inferencePool.objectives=interactive=-10\,batch=10",
        ),
    ),
}


def helm() -> str:
    """Returns the path of the program `helm`, from this Python environment or the PATH. Raises NoHelm."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.is_file() else shutil.which("helm")
    if found is None:
        raise NoHelm("helm is not installed: `make helm` puts it into .venv/bin")
    return found


def template(*arguments: str, release: str = "sluice", chart: Path = CHART) -> str:
    """Returns the output of `helm template`. Raises NoHelm, and CalledProcessError with Helm's `stderr`."""
    command = [helm(), "template", release, str(chart), "--namespace", "sluice", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def render(rendering: Rendering, chart: Path = CHART) -> str:
    """Returns the content of a rendered file."""
    arguments = [word for name in rendering.templates for word in ("--show-only", f"templates/{name}.yaml")]
    arguments += [word for value in rendering.values for word in ("--set", value)]
    return HEAD + re.sub(r"^# Source: .*\n", "", template(*arguments, chart=chart), flags=re.MULTILINE)


def write_all() -> None:
    """Writes every rendered file. Raises NoHelm."""
    for name, rendering in FILES.items():
        (FOLDER / name).write_text(render(rendering))

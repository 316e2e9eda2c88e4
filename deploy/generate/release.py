"""Names the images of a release, and renders deploy/kubernetes/ and deploy/gateway/pool.yaml from the Helm chart."""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.build import VERSION, commit

DEPLOY = Path(__file__).parents[1]
CHART = DEPLOY / "helm" / "sluice"
FOLDER = DEPLOY / "kubernetes"
HEAD = (
    "# Made from deploy/helm/sluice by `python -m deploy.generate.release`: change the chart, or this in a patch "
    "of your own.\n"
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
    "components/prefill/prefill.yaml": Rendering(("prefill",), ("prefill.replicas=1",)),
    "components/prefill/prefill-cpu.yaml": Rendering(("prefill",), ("prefill.replicas=1", "device=cpu")),
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


# `python -m deploy.generate.release [--registry R] [--build] [--push]`: writes the names of a release's images
# everywhere.
#
# The version comes from shared/build.py. The command writes names and tags into the chart and the compose file, and
# renders the manifests from the chart; --build and --push run docker. Run it in a checkout.

ROOT = DEPLOY.parent


def name_images(version: str, registry: str) -> None:
    """Writes version and registry into the chart and the compose file."""
    _replace(CHART / "Chart.yaml", r"(?<=^version: ).*|(?<=^appVersion: ).*", version)
    _replace(CHART / "values.yaml", r'(?<=^  registry: )"[^"]*"', f'"{registry}"')
    for image in IMAGES:
        if not image.variant:
            pattern = rf"(?<=image: )\S*{image.name}(:\S+)?$"
            _replace(DEPLOY / "docker/compose.yml", pattern, image.reference(version, registry))


def _replace(file: Path, pattern: str, text: str) -> None:
    replaced, count = re.subn(pattern, lambda _: text, file.read_text(), flags=re.MULTILINE)
    assert count, f"{file} has no {pattern}"
    file.write_text(replaced)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.generate.release", description=__doc__.partition("\n")[0])
    parser.add_argument("--registry", default="", help="in front of the images' names, as registry.example.com/team")
    parser.add_argument("--build", action="store_true", help="build the images with docker")
    parser.add_argument("--push", action="store_true", help="push them")
    parser.add_argument("--torch-index", default="", help="package index with a torch without CUDA, for the -cpu image")
    args = parser.parse_args(words)
    release = VERSION
    name_images(release, args.registry)
    try:
        write_all()
    except NoHelm as error:
        print(f"python -m deploy.generate.release: {error}", file=sys.stderr)
        return 1
    for image in IMAGES:
        reference = image.reference(release, args.registry)
        commands = [image.build(release, args.registry, commit(), args.torch_index)] if args.build else []
        commands += [["docker", "push", reference]] if args.push else []
        print(reference, flush=True)
        for command in commands:
            subprocess.run(command, cwd=ROOT, check=True)
    return 0


# Defines names and tags of the images, and how they are built. Chart, manifests and compose file repeat the names.

DOCKERFILE = "deploy/docker/Dockerfile"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a release.

    target: stage of the Dockerfile
    variant: suffix of the tag
    torch_index: whether torch may come from a separate package index
    """

    name: str
    target: str
    variant: str = ""
    torch_index: bool = False

    def reference(self, version: str, registry: str = "") -> str:
        """Returns the full name of the image with its tag."""
        place = f"{registry.rstrip('/')}/" if registry else ""
        return f"{place}{self.name}:{version}{self.variant}"

    def build(self, version: str, registry: str, commit: str, torch_index: str) -> list[str]:
        """Returns the command that builds the image; run it in the root of a checkout."""
        arguments = [f"COMMIT={commit}"] if commit else []
        arguments += [f"PIP_EXTRA_INDEX_URL={torch_index}"] if torch_index and self.torch_index else []
        words = ["docker", "build", "-f", DOCKERFILE, "--target", self.target]
        words += [word for argument in arguments for word in ("--build-arg", argument)]
        return [*words, "-t", self.reference(version, registry), "."]


IMAGES = (
    Image("sluice-frontend", "frontend"),
    Image("sluice-worker", "worker"),  # PyPI's torch supports NVIDIA GPUs and CPUs
    # an image without CUDA's libraries has a tenth of the size
    Image("sluice-worker", "worker", "-cpu", torch_index=True),
)


if __name__ == "__main__":
    sys.exit(main())

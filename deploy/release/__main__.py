"""`python -m deploy.release [--registry R] [--build] [--push]`: writes the names of a release's images everywhere.

The version comes from shared/build.py. The command writes names and tags into the chart and the compose file, and
renders the manifests from the chart; --build and --push run docker. Run it in a checkout.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from deploy.release.images import IMAGES
from deploy.release.manifests import CHART, DEPLOY, NoHelm, write_all
from shared.build import VERSION, commit

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
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__.partition("\n")[0])
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
        print(f"python -m deploy.release: {error}", file=sys.stderr)
        return 1
    for image in IMAGES:
        reference = image.reference(release, args.registry)
        commands = [image.build(release, args.registry, commit(), args.torch_index)] if args.build else []
        commands += [["docker", "push", reference]] if args.push else []
        print(reference, flush=True)
        for command in commands:
            subprocess.run(command, cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

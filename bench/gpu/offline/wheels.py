"""Lists the wheels to bring to a machine with a GPU and without a network, from pyproject.toml."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
# A machine set up for PyTorch and its tests has these packages. A torch wheel has gigabytes and must match the GPU's
# driver. Whether one of them is missing after all, the part `environment` of --call says.
THERE = {
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub", "jinja2", "pillow",
    "uvloop", "prometheus-client", "pytest", "hypothesis",
}  # fmt: skip
TESTS = {"pytest", "pytest-asyncio", "hypothesis", "httpx"}
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def requirements() -> list[str]:
    """Returns pip requirements of the server and the kernel tests, without the packages in THERE."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    tests = [line for line in project["optional-dependencies"]["dev"] if _name(line) in TESTS]
    lines = [line for line in (*project["dependencies"], *tests) if _name(line) not in THERE]
    return [line.split(";")[0].strip() for line in lines]


def advice(python: str) -> str:
    """Says how to fetch the wheels. python: the version of the GPU's machine, such as 3.12."""
    if not PYPROJECT.exists():
        return "Wheels to bring: see pyproject.toml in a checkout of Sluice"
    platforms = " ".join(f"--platform {name}" for name in PLATFORMS)
    needed = " ".join(f"'{line}'" for line in requirements())
    return (
        f"Wheels to bring, if that machine has PyTorch and transformers:\n  pip download --only-binary=:all: "
        f"--python-version {python} {platforms} -d wheels {needed}\n  there: pip install --no-index --find-links "
        "wheels --no-deps wheels/*.whl"
    )


def _name(line: str) -> str:
    return re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")

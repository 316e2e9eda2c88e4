"""Packages that measurements need, and which of them are missing. Imports only the standard library."""

from collections.abc import Iterable
from importlib.util import find_spec

# import name → distribution name, where they differ
DISTRIBUTIONS = {
    "zmq": "pyzmq", "sse_starlette": "sse-starlette", "prometheus_client": "prometheus-client",
    "pytest_asyncio": "pytest-asyncio",
}  # fmt: skip
WORKER = ("torch", "triton", "numpy", "safetensors", "msgspec", "zmq", "prometheus_client")
MODELS = (*WORKER, "transformers", "tokenizers")
SERVER = (
    *MODELS, "gguf", "jinja2", "llguidance", "starlette", "uvicorn", "sse_starlette", "uvloop", "httptools", "shtab",
)  # fmt: skip
TESTS = (*WORKER, "pytest", "hypothesis")


def missing(packages: Iterable[str]) -> list[str]:
    """Returns the distributions of the packages that cannot be imported. Imports no package."""
    return [DISTRIBUTIONS.get(name, name) for name in packages if find_spec(name) is None]


def sentence(absent: Iterable[str]) -> str:
    """Says which wheels to bring to a machine without a network."""
    return f"bring the wheels of {', '.join(absent)}, and install them with pip install --no-index --find-links FOLDER"


def explained(error: ModuleNotFoundError) -> str:
    """Explains a failed import: names the missing package, and all other missing packages that a server needs."""
    name = (error.name or "").split(".")[0]
    absent = dict.fromkeys([DISTRIBUTIONS.get(name, name), *missing(SERVER)])
    return f"the package {DISTRIBUTIONS.get(name, name)} is missing: {sentence(absent)}"

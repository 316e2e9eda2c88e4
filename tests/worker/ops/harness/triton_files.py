"""The files of Triton kernels, by the rule of the tree: `triton*.py` of an operation, and of the adapters."""

from pathlib import Path

WORKER = Path(__file__).parents[4] / "worker"
TRITON_FILES = sorted((*WORKER.glob("ops/**/triton*.py"), *WORKER.glob("lora/triton*.py")))

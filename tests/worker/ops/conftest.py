"""Fixtures that run Triton kernels on a GPU, or without a GPU in Triton's interpreter (only in fp32 and fp16, because
interpreted bf16 is wrong)."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.worker.ops.harness import interpreter


def _interpret_triton() -> None:
    """Imports Triton again if a module such as transformers imported it before, because Triton reads TRITON_INTERPRET
    when its functions are decorated. Triton's compiled library stays loaded."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    interpreter.prepare()


if not torch.cuda.is_available():
    _interpret_triton()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]


@pytest.fixture(scope="session")
def device() -> str:
    """The device on which Triton launchers run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores torch's number of threads, which the test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

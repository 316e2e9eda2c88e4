"""Fixtures that run Triton kernels on a GPU, or without a GPU in Triton's interpreter (only in fp32 and fp16, because
interpreted bf16 is wrong)."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


def _interpret_triton() -> None:
    """Imports Triton again if a module such as transformers imported it before, because Triton reads TRITON_INTERPRET
    when its functions are decorated. Triton's compiled library stays loaded."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    _read_run_time_numbers()


def _read_run_time_numbers() -> None:
    """Patches Triton 3.6's interpreter, which calls int() on an array of one number: NumPy 2.4 refuses such a call."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


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


@pytest.fixture
def dot_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's dot add the products along K one after another. NumPy's order depends on the tile."""
    if device == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(x: TensorHandle) -> np.ndarray:
        """Returns a tensor's numbers. The interpreter stores float8 numbers as bytes."""
        return torch.from_numpy(x.data).view(torch.float8_e4m3fn).float().numpy() if x.dtype.is_fp8() else x.data

    def dot(_: object, a: TensorHandle, b: TensorHandle, total: TensorHandle, *how: object) -> TensorHandle:
        result = total.data.copy()
        left, right = (numbers(one).astype(result.dtype) for one in (a, b))
        for k in range(left.shape[1]):
            result += left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)

"""choose.py chooses the right form of an operation, and no form imports another form."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random, rope_tables
from worker.ops import choose, launch_options, rope
from worker.ops.norm import native as norm_in_c
from worker.ops.rope import native as rope_in_c
from worker.ops.rope.reference import qkv_rope_write_torch

OPS = Path(choose.__file__).parent


class OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU, for Triton's interpreter."""

    is_cuda = True  # type: ignore[assignment]


def ours(path: Path) -> Iterator[str]:
    """Returns the modules of worker/ops that a file imports, relative to worker/ops."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("worker.ops"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name.removeprefix("worker.ops.") for name in names)


def test_definitions_know_no_device_and_kernels_know_no_choice() -> None:
    """reference.py defines an operation, triton*.py and native.py compute it on a device; only __init__.py chooses."""
    found = {path: set(ours(path)) for path in OPS.glob("*/*.py")}
    # products and experts take packed weights, which may be those of the C library: their definitions multiply by these
    packed = {"linear", "moe"}
    definitions = [path for path in found if path.name == "reference.py" and path.parent.name not in packed]
    assert len(definitions) >= 5
    for path in definitions:
        assert not [one for one in found[path] if ".native" in one or ".triton" in one], path
    for path in (path for path in found if path.name.startswith("triton")):
        assert not [one for one in found[path] if one.split(".")[-2:-1] == ["native"] or one.startswith("choose")], path
    for path in (path for path in found if path.name == "native.py"):
        assert not [one for one in found[path] if ".triton" in one or one.startswith("choose")], path


def test_form_is_that_of_the_device_and_of_what_the_library_can() -> None:
    def form(name: str) -> choose.Form:
        return lambda *args, **named: (name, args, named)

    for can, expected in ((True, "c"), (False, "torch")):
        operation = choose.choosing(
            form("torch"), "worker.ops.norm.triton.rms_norm_triton", form("c"), lambda x, weight, can=can: can
        )
        assert operation(torch.ones(1), 2, eps=3, options=launch_options.NO_OPTIONS) == (
            expected,
            (torch.ones(1), 2),
            {"eps": 3},
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors pretend to be on a GPU")
def test_norms_of_whole_rows_on_a_gpu_never_reach_the_library_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> Tensor:
        raise AssertionError("the C library would read a GPU's addresses")

    sizes, dtype = (2, 1, 16), torch.float32
    qkv = random(3, (sizes[0] + 2 * sizes[1]) * sizes[2])
    norms = {"q_norm": random(sizes[0] * sizes[2], seed=1), "k_norm": random(sizes[1] * sizes[2], seed=2)}
    where = (*rope_tables(9, sizes[2]), torch.tensor([0, 4, 8]), torch.tensor([3, 1, 2]))
    plain, pretended = ([torch.zeros(2, 4, sizes[1], sizes[2]) for _ in "kv"] for _ in "12")
    expected = qkv_rope_write_torch(qkv, *plain, *where, **norms, eps=1e-6, offset=False, dtype=dtype)
    monkeypatch.setattr(norm_in_c, "rms_norm", refuse)
    for name in ("rotary", "store_kv", "qkv_rope_write"):
        monkeypatch.setattr(rope_in_c, name, refuse)
    caches = [cache.as_subclass(OnGpu) for cache in pretended]
    got = rope.qkv_rope_write(qkv.as_subclass(OnGpu), *caches, *where, **norms, eps=1e-6, offset=False, dtype=dtype)
    torch.testing.assert_close(got.as_subclass(Tensor), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(pretended, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

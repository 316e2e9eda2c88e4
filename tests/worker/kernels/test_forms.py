"""forms.py chooses the right form of an operation, and no form imports another form."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.kernels.harness.cases import random, rope_tables
from worker.ops import choose, launch_options, rope
from worker.ops import native as c_library
from worker.ops.rope.reference import qkv_rope_write_torch

KERNELS = Path(forms.__file__).parent
# Modules that choose between Triton and C forms. All other modules of the folder define operations in plain PyTorch.
CHOOSING = ("forms", "operations", "linear", "experts", "sample", "library_products")
# file → choosing modules that it may import, because the product of a router may have any form
UPWARD = {"gpu/experts/experts.py": {"experts", "linear"}}


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
    own = [path for path in KERNELS.rglob("*.py") if path.relative_to(KERNELS).parts[0] not in ("gpu", "cpu")]
    definitions = [path for path in own if path.parent != KERNELS or path.stem not in CHOOSING]
    assert len(definitions) > 15
    assert not [(path.name, one) for path in definitions for one in ours(path) if one.startswith(("gpu.", "cpu."))]
    for path in (*KERNELS.glob("gpu/**/*.py"), *KERNELS.glob("cpu/**/*.py")):
        name = path.relative_to(KERNELS).as_posix()
        assert {one.split(".")[0] for one in ours(path)} & set(CHOOSING) == UPWARD.get(name, set()), name
    assert not [path.name for path in KERNELS.glob("cpu/**/*.py") if [one for one in ours(path) if one[:4] == "gpu."]]
    assert not [path.name for path in KERNELS.glob("gpu/**/*.py") if [one for one in ours(path) if one[:4] == "cpu."]]


def test_form_is_that_of_the_device_and_of_what_the_library_can() -> None:
    def form(name: str) -> choose.Form:
        return lambda *args, **named: (name, args, named)

    for can, expected in ((True, "c"), (False, "torch")):
        operation = choose.choosing(
            form("torch"), "rowwise.norm.rms_norm_triton", form("c"), lambda x, weight, can=can: can
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
    for name in ("rms_norm", "rotary", "store_kv", "qkv_rope_write"):
        monkeypatch.setattr(c_library, name, refuse)
    caches = [cache.as_subclass(OnGpu) for cache in pretended]
    got = rope.qkv_rope_write(qkv.as_subclass(OnGpu), *caches, *where, **norms, eps=1e-6, offset=False, dtype=dtype)
    torch.testing.assert_close(got.as_subclass(Tensor), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(pretended, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

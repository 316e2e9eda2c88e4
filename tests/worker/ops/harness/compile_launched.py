"""Compiles kernels as their callers launch them: norms, rotary embeddings, recurrent layers, gates, adapters, codes.

Launches are caught on the fake GPU. Checks that the compiler never turns a product and a sum into one instruction
(FFMA), which rounds once instead of twice: two kernels that compute the same formula could then have different bits.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.checks.cases import CASES
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.rehearsals import bench_environment
from bench.gpu.offline.triton_offline import SHARED, contracted, usage
from tests.worker.ops.harness.compile_quantized import FORMATS, weight
from worker.lora.triton import add_products_triton, part_table, tiles_of
from worker.ops.activation import output_gate
from worker.ops.linear.triton_unpack import unpack_triton

NAMES = ("norm", "rotary", "store_kv", "qkv_rope_write", "act_and_mul", "recurrent")
COLUMNS, DEPTH = 4096, 14336


def launched() -> list[Compilation]:
    """Returns the compilations of the bench's checks, an output gate, an adapter, and of unpacking two formats."""
    with gpu() as machine, tempfile.TemporaryDirectory() as folder, bench_environment(Path(folder), ("tiny",)) as env:
        for name in NAMES:
            for case in CASES[name](env):
                case.got()
        x, y = (torch.empty(70, size, dtype=torch.bfloat16, device=env.device) for size in (DEPTH, COLUMNS))
        output_gate(y, y)
        _add_adapter(x, y)
        for format in FORMATS[:5:4]:
            packed = weight(COLUMNS, DEPTH, *format)
            names = [name for name in ("codes", "scale", "minimum", "table") if getattr(packed, name) is not None]
            on_gpu = {name: torch.empty_like(getattr(packed, name), device=env.device) for name in names}
            unpack_triton([replace(packed, **on_gpu)], torch.bfloat16)
    assert not machine.findings, machine.findings
    return machine.launches.compilations


def _add_adapter(x: Tensor, y: Tensor) -> None:
    """Adds the product of x with an adapter of 32 ranks to y."""
    a, b = (torch.empty(*shape, dtype=x.dtype, device=x.device) for shape in ((32, x.shape[1]), (y.shape[1], 32)))
    table = part_table(a, torch.empty(y.shape[1], device=x.device), [(b, 0, 32, 0)])
    add_products_triton(y, x, tiles_of([torch.arange(len(x), device=x.device)], [1.0]), [table], 32)


def first_of_each(compilations: list[Compilation]) -> Iterator[Compilation]:
    """Yields the first compilation of each kernel, and both of the kernel that unpacks codes."""
    seen = set[str]()
    for one in compilations:
        if one.kernel.__name__ not in seen or one.kernel.__name__ == "_unpack_kernel":
            seen.add(one.kernel.__name__)
            yield one


def check() -> None:
    found = launched()
    for one in found:
        assert not one.options["enable_fp_fusion"], one.key
    for one in first_of_each(found):
        compiled = one.compiled()
        used = usage(compiled)
        print(one.kernel.__name__, used, flush=True)
        assert contracted(compiled) == 0, one.key
        assert used.stack == 0 and used.shared <= SHARED[one.capability], (one.key, used)


if __name__ == "__main__":
    check()

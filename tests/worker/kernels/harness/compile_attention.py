"""The attention kernels in bfloat16, and over a cache of eight bits, as compiled for Hopper.

Checks what the interpreter cannot see: Hopper's own products, keys and values copied 16 bytes at a time, two decodes at
once on a multiprocessor, nothing spilled, and that what a row goes through is the same in both kernels.
"""

import re
import subprocess
import tempfile
from itertools import product
from typing import Any

import torch
import triton

from bench.gpu.offline.triton_offline import SHARED, Variant, copies, tensor_core_steps, usage
from worker.kernels.gpu import attention

X, F, N, F8 = "*bf16", "*fp32", "*i32", "*fp8e4nv"
KV_HEADS = 8
MULTIPROCESSOR, SYSTEM = 228 << 10, 1 << 10  # bytes of shared memory; SYSTEM's part of a program
# arguments that the compiler may not assume to be multiples of 16
UNKNOWN = ("page_table_stride", "max_splits", "sequences", "window")
SHAPES = [(64, 4, 16), (64, 8, 16), (128, 3, 32), (256, 4, 64)]  # head, query heads of a group, page


def attend(
    kernel: Any, head: int, group: int, page: int, cache: str = X, extended: bool = False, gpu: int = 90
) -> Variant:
    """extended: with sinks and a soft cap. gpu: its compute capability."""
    tiles = attention.choose_tiles(head, group, torch.bfloat16, SHARED[gpu])
    decode = kernel is attention._decode_kernel
    height = tiles.decode_m if decode else tiles.prefill_m
    constants = {
        "HEADS": KV_HEADS * group, "KV_HEADS": KV_HEADS, "HEAD": head, "PAGE": page,
        "SPLIT_SIZE": attention.SPLIT_SIZE, "SHORT_SPLITS": attention.SHORT_SPLITS, "UNIFORM": False,
        "BLOCK_D": triton.next_power_of_2(head), "BLOCK_M": height, "BLOCK_N": tiles.block_n,
    }  # fmt: skip
    rows = {} if decode else {"ROWS": height // group}
    missing = {} if extended else {"cap_scale": None} if decode else {"cap_scale": None, "sinks_ptr": None}
    sinks, cap = ([F], ["fp32"]) if extended else ([], [])
    results = [F] * 3 if decode else [X, *sinks]
    types = [X, cache, cache, *results, N, N, N, "fp32", "i32", *cap, "i32", "i32", "i32"]
    warps = tiles.decode_warps if decode else tiles.prefill_warps
    options = attention.NO_FP_FUSION | {"num_warps": warps, "num_stages": tiles.stages}
    return Variant(kernel, types, constants | rows | missing, options, UNKNOWN, capability=gpu)


def combine(head: int, extended: bool = False) -> Variant:
    constants = {
        "HEADS": 24, "HEAD": head, "SPLIT_SIZE": attention.SPLIT_SIZE, "SHORT_SPLITS": attention.SHORT_SPLITS,
        "UNIFORM": True, "BLOCK_D": triton.next_power_of_2(head), "SPLITS_AT_ONCE": attention.SPLITS_AT_ONCE,
    }  # fmt: skip
    types = [F, F, F, X, *([F] if extended else []), N, N, "fp32", "i32", "i32"]
    missing = {} if extended else {"sinks_ptr": None}
    options = attention.NO_FP_FUSION | {"num_warps": 1}
    return Variant(attention._combine_kernel, types, constants | missing, options, UNKNOWN)


def compiled(variant: Variant) -> Any:
    made = variant.compiled()
    used = usage(made)
    print(variant.kernel.__name__, used)
    at_once = 2 if variant.kernel is attention._decode_kernel and variant.constants["HEAD"] <= 128 else 1
    assert used.stack == 0, (variant, used)
    assert used.shared <= SHARED[90] and at_once * (used.shared + SYSTEM) <= MULTIPROCESSOR, (variant, used)
    return made


def way_of_a_row(made: Any) -> list[tuple[str, str]]:
    """Each product's step, and over how many groups of four warps its columns are spread."""
    assert max(copies(made)) == 16
    assert all(step.startswith("m64n") for step in tensor_core_steps(made))
    assert "serialized" not in complaints(made), complaints(made)
    layouts = re.findall(
        r"nvidia_mma<{versionMajor = 3[^}]*warpsPerCTA = \[\d+, (\d+)\][^}]*instrShape = \[([^\]]*)\]",
        made.asm["ttgir"],
    )
    assert len(layouts) == 2, layouts
    return sorted(layouts)


def complaints(made: Any) -> str:
    """The assembler's: products that it has to do one after another, as something else touches their sums meanwhile."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(made.asm["ptx"])
        ptx.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def check() -> None:
    for shape, extended in product(SHAPES, (False, True)):
        decode, prefill = (
            way_of_a_row(compiled(attend(kernel, *shape, extended=extended)))
            for kernel in (attention._decode_kernel, attention._prefill_kernel)
        )
        assert decode == prefill
        assert shape[0] > 128 or all(spread == "1" for spread, _ in decode)
    way_of_a_row(compiled(attend(attention._decode_kernel, 96, 4, 32, F8)))
    for extended in (False, True):
        compiled(combine(96, extended))
    for gpu, shape in ((89, (64, 4, 16)), (120, (256, 4, 64)), (120, (512, 4, 64))):
        used = usage(attend(attention._prefill_kernel, *shape, gpu=gpu).compiled())
        assert used.shared <= SHARED[gpu], (gpu, shape, used)

"""Compiles the attention kernels in bfloat16, and over an eight-bit K/V cache, for Hopper.

Checks what the interpreter cannot show: products use wgmma, keys and values are copied 16 bytes at a time, no register
is spilled in the loop over keys, two programs of the split kernel fit on a multiprocessor, and both kernels compute a
row in the same way. `python -m tests.worker.ops.harness.compile_attention [DAY]`: with a day, half of the shapes.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton

from bench.gpu.offline.triton_offline import (
    SHARED,
    Variant,
    copies,
    exponentials_in_flight,
    spilled_in_loop,
    tensor_core_steps,
    usage,
)
from tests.worker.ops.harness.compile_quantized import drawn
from worker.ops.attention import triton as attention

X, F, N, F8 = "*bf16", "*fp32", "*i32", "*fp8e4nv"
KV_HEADS = 8
FEW_BYTES = 32  # bytes that a thread may spill outside of the loop over keys
MULTIPROCESSOR, SYSTEM = 228 << 10, 1 << 10  # bytes of shared memory; the system reserves SYSTEM for each program
# arguments that the compiler may not assume to be multiples of 16
UNKNOWN = ("page_table_stride", "max_rows", "max_splits", "sequences", "window")
SHAPES = [(64, 4, 16), (64, 8, 16), (128, 3, 32), (256, 4, 64)]  # head_dim, query heads of a K/V head, page size


def attend(
    kernel: Any, head: int, group: int, page: int, cache: str = X, extended: bool = False, gpu: int = 90,
    sequences: int = 1, merges: bool = False, spans: bool = False,
) -> Variant:  # fmt: skip
    """Compiles a kernel.

    extended: whether the kernel gets sinks and a soft cap. gpu: compute capability. merges: whether a tile's last
    program merges the splits. spans: whether rows may attend to keys after their own position
    """
    tiles = attention.choose_tiles(head, group, torch.bfloat16, SHARED[gpu])
    split = kernel is attention._split_kernel
    height, warps = (tiles.split_m, tiles.split_warps) if split else (tiles.prefill_m, tiles.prefill_warps)
    constants = {
        "HEADS": KV_HEADS * group, "KV_HEADS": KV_HEADS, "HEAD": head, "PAGE": page, "ROWS": height // group,
        "SPLIT_SIZE": attention.SPLIT_SIZE, "SHORT_SPLITS": attention.SHORT_SPLITS, "UNIFORM": False,
        "BLOCK_S": attention.sequence_block(sequences), "BLOCK_D": triton.next_power_of_2(head), "BLOCK_M": height,
        "BLOCK_N": tiles.block_n,
    }  # fmt: skip
    given = {"out_ptr": X, "sinks_ptr": F, "visible_ptr": N, "arrivals_ptr": N, "cap_scale": "fp32"}
    missing = set() if extended else {"sinks_ptr", "cap_scale"}
    types = [X, cache, cache]
    if split:
        constants["SPLITS_AT_ONCE"] = attention.SPLITS_AT_ONCE
        missing |= set() if merges else {"out_ptr", "sinks_ptr", "arrivals_ptr"}
        types += [F] * 3
    else:
        constants |= {"OVERLAP": False, "NESTED": gpu >= attention.NESTED_FROM}
        missing |= set() if spans else {"visible_ptr"}
    options_of = ("out_ptr", "sinks_ptr", "arrivals_ptr" if split else "visible_ptr")
    types += [given[name] for name in options_of if name not in missing]
    types += [N, N, N, "fp32", "i32", *(["fp32"] if extended else []), "i32", "i32", "i32", "i32"]
    types += ["i32"] if split else []
    nothing = {name: None for name in missing}
    options = attention.NO_FP_FUSION | {"num_warps": warps, "num_stages": tiles.stages}
    return Variant(kernel, types, constants | nothing, options, UNKNOWN, capability=gpu)


def combine(head: int, extended: bool = False, sequences: int = 1) -> Variant:
    constants = {
        "HEADS": 24, "HEAD": head, "SPLIT_SIZE": attention.SPLIT_SIZE, "SHORT_SPLITS": attention.SHORT_SPLITS,
        "UNIFORM": True, "BLOCK_S": attention.sequence_block(sequences), "BLOCK_D": triton.next_power_of_2(head),
        "SPLITS_AT_ONCE": attention.SPLITS_AT_ONCE,
    }  # fmt: skip
    types = [F, F, F, X, *([F] if extended else []), N, N, "fp32", "i32", "i32", "i32", "i32"]
    missing = {} if extended else {"sinks_ptr": None}
    options = attention.NO_FP_FUSION | {"num_warps": 1}
    return Variant(attention._combine_kernel, types, constants | missing, options, UNKNOWN)


def compiled(variant: Variant) -> Any:
    made = variant.compiled()
    used = usage(made)
    print(variant.kernel.__name__, used)
    at_once = 2 if variant.kernel is attention._split_kernel and variant.constants["HEAD"] <= 128 else 1
    assert used.stack <= FEW_BYTES, (variant, used)
    assert used.stack == 0 or spilled_in_loop(made) == 0, (variant, used)
    assert used.shared <= SHARED[90] and at_once * (used.shared + SYSTEM) <= MULTIPROCESSOR, (variant, used)
    return made


def way_of_a_row(made: Any) -> list[tuple[str, str]]:
    """Returns each product's instruction shape, and the number of groups of four warps that share its columns."""
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
    """Returns the assembler's messages: it warns if products cannot overlap because other code uses their sums."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(made.asm["ptx"])
        ptx.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def check_overlap(shape: tuple[int, int, int]) -> None:
    """Asserts that with overlap, most softmax weights of a block are computed during the next block's product.

    The products of both forms must use the same instructions.
    """
    variant = attend(attention._prefill_kernel, *shape, sequences=200)
    plain, made = (
        replace(variant, constants=variant.constants | {"OVERLAP": overlap}).compiled() for overlap in (False, True)
    )
    weights = variant.constants["BLOCK_M"] * variant.constants["BLOCK_N"] // (32 * variant.options["num_warps"])
    assert way_of_a_row(made) == way_of_a_row(plain)
    assert exponentials_in_flight(plain) == 0 and exponentials_in_flight(made) > weights * 3 // 4
    assert "warpgroup.wait is injected" not in complaints(made), complaints(made)
    assert spilled_in_loop(made) == 0 and usage(made).stack <= 2 * FEW_BYTES and usage(made).shared <= SHARED[90]


def check(day: str) -> None:
    """Compiles the shapes that are drawn by `day`, or all."""
    for shape, extended in drawn([*product(SHAPES, (False, True))], day):
        split, prefill = (
            way_of_a_row(compiled(attend(kernel, *shape, extended=extended, sequences=200)))
            for kernel in (attention._split_kernel, attention._prefill_kernel)
        )
        assert split == prefill
        assert shape[0] > 128 or all(spread == "1" for spread, _ in split)
    check_overlap((128, 3, 32))
    for extended in (False, True):
        spans, plain = (
            way_of_a_row(compiled(attend(attention._prefill_kernel, 128, 3, 32, extended=extended, spans=given)))
            for given in (True, False)
        )
        assert spans == plain
    way_of_a_row(compiled(attend(attention._split_kernel, 96, 4, 32, F8)))
    merging = compiled(attend(attention._split_kernel, 128, 3, 32, merges=True))
    before, atomic, _ = merging.asm["ptx"].partition("atom.global.gpu.acq_rel.add")
    assert atomic and "st.global" not in before.rpartition("bar.sync")[2]
    for extended in (False, True):
        compiled(combine(96, extended))
    for gpu, shape in ((89, (64, 4, 16)), (120, (256, 4, 64)), (120, (512, 4, 64))):
        used = usage(attend(attention._prefill_kernel, *shape, gpu=gpu).compiled())
        assert used.shared <= SHARED[gpu], (gpu, shape, used)
    for gpu in (100, 120):
        made = attend(attention._prefill_kernel, 128, 4, 32, gpu=gpu, sequences=200).compiled()
        assert spilled_in_loop(made) == 0, gpu


if __name__ == "__main__":
    check(*sys.argv[1:] or ["all"])

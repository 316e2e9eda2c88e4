"""Unpacks the usual block formats of GGUF files in C (csrc/gemm/unpack_blocks.c): several times as fast as PyTorch.

`worker/model/gguf/blocks.py` defines what the formats mean.
"""

from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import kernels, library

IN_C = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")  # in the order of FORMATS in C


def unpack_blocks(
    name: str, rows: Tensor, blocks: int, codes: Tensor, scale: Tensor, minimum: Tensor | None
) -> bool:  # fmt: skip
    """Unpacks rows [N, bytes] of so many blocks to codes [N, K], scales and minimums [N, groups].

    Returns False, and does nothing, if the library does not have the format or does not run.
    """
    found = library()
    if name not in IN_C or rows.is_cuda or found is None or not kernels():
        return False
    assert all(tensor is None or tensor.is_contiguous() for tensor in (rows, codes, scale, minimum))
    found.unpack_blocks(
        c_int(IN_C.index(name)), c_void_p(rows.data_ptr()), c_long(len(rows)), c_long(blocks),
        c_void_p(codes.data_ptr()), c_void_p(scale.data_ptr()),
        c_void_p(None if minimum is None else minimum.data_ptr()), c_int(torch.get_num_threads()),
    )  # fmt: skip
    return True

"""Products in which every head has a weight of its own. Latent attention has such weights (worker/models/latent.py).

The weights of all heads are packed like one linear of a layer's experts: head h is expert h, and every row uses all.
"""

import ctypes

import torch
from torch import Tensor

from worker.ops.linear.native import GemmJob
from worker.ops.moe.native import CpuExperts
from worker.ops.moe.packed import PackedExperts
from worker.ops.moe.reference import expert_linear
from worker.ops.native import kernels


def linear_per_head_torch(x: Tensor, packed: PackedExperts) -> Tensor:
    """Returns for each head h the product x[:, h] @ weight[h].T: [T, H, N] in x's dtype, contiguous.

    x: [T, H, K]
    """
    return torch.stack([expert_linear(x[:, h].contiguous(), packed, h) for h in range(x.shape[1])], dim=1)


def linear_per_head(x: Tensor, packed: PackedExperts) -> Tensor:
    """Computes the same as linear_per_head_torch: in C if the weights are packed for it, or in Triton on a GPU."""
    if packed.cpu is not None:
        return _in_c(x, packed.cpu)
    if x.is_cuda:
        from worker.ops.moe.triton import linear_per_head_triton

        return linear_per_head_triton(x, packed)
    return linear_per_head_torch(x, packed)


def _in_c(x: Tensor, packed: CpuExperts) -> Tensor:
    """Raises MemoryError when there is no memory for the threads' buffers."""
    (t, heads, k), n, size = x.shape, packed.n, x.element_size()
    assert heads == packed.count and k == packed.k and x.dtype == packed.dtype
    by_head, out = x.transpose(0, 1).contiguous(), torch.empty(heads, t, n, dtype=x.dtype)
    jobs = (GemmJob * heads)()
    for h, job in enumerate(jobs):
        job.weights, job.t = ctypes.addressof(packed.structs[h]), t
        job.x, job.out = by_head.data_ptr() + h * t * k * size, out.data_ptr() + h * t * n * size
    if kernels()[x.dtype].gemm(ctypes.addressof(jobs), heads, x.dtype == torch.bfloat16, torch.get_num_threads()):
        raise MemoryError("no memory for the buffers of a matmul")
    return out.transpose(0, 1).contiguous()

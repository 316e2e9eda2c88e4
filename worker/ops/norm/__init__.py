"""RMS norms, alone or after adding the residual: chooses which form runs."""

from torch import Tensor

from worker.ops.choose import choosing, has_dtype, has_dtype_of_residual
from worker.ops.norm import native
from worker.ops.norm.reference import add_rms_norm_torch, rms_norm_torch, sum_split_k

# Forms in C that need other arguments than the operation has


def _add_rms_norm_in_c(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *,
    offset: bool = False, x_norm: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = sum_split_k(x, residual.ndim, residual.dtype)
    x = x if x_norm is None else native.rms_norm(x, x_norm, eps, offset)
    return native.add_rms_norm(x, residual, weight, eps, offset, scale)


rms_norm = choosing(rms_norm_torch, "worker.ops.norm.triton.rms_norm_triton", native.rms_norm, has_dtype)
add_rms_norm = choosing(
    add_rms_norm_torch,
    "worker.ops.norm.triton.add_rms_norm_triton",
    _add_rms_norm_in_c,
    has_dtype_of_residual,
)

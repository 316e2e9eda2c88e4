"""Products with a packed weight in PyTorch, which define them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.activation.reference import act_and_mul_torch
from worker.ops.linear import native
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import unpack_codes
from worker.ops.quantized_weight import linear_quantized_torch
from worker.spec import Activation


def linear_torch(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
    """Computes the same as `linear`, without Triton and without partial sums.

    If a weight is packed for the C library, the C library multiplies by it, because no other copy of the weight exists.
    """
    if packed.cpu is not None:
        return native.linear(x, packed.cpu, out_dtype=torch.float32 if fp32_out else None)
    if packed.scale is not None:
        y = linear_quantized_torch(x, packed.weight, packed.scale, packed.bias, dynamic=packed.dynamic)
    elif packed.codes:
        weight = torch.cat([unpack_codes(part).dequantize(x.dtype) for part in packed.codes])
        y = F.linear(x, weight, packed.bias)
    else:
        y = F.linear(x, packed.weight, packed.bias)
    return y.float() if fp32_out else y


def gated_linear_torch(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    return act_and_mul_torch(linear_torch(x, packed), activation)

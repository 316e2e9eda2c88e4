"""From a GPTQ checkpoint that bench/ writes, the worker reads the weights, rounded to the nearest code."""

import torch

from bench.gptq_checkpoint import GROUP, gptq
from worker.ops.quantized_weight import INT4, quantize_groups


def test_gptq_tensors_mean_the_rounded_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 2 * GROUP)
    tensors = gptq(weight)
    codes, zeros = (
        torch.stack([tensors[name].long() >> 4 * i & 15 for i in range(8)], dim=-1) for name in ("qweight", "qzeros")
    )
    by_input = codes.transpose(1, 2).reshape(2 * GROUP, 24)  # [K / 8, N, 8] → [K, N]
    zero = zeros.flatten(1)[tensors["g_idx"].long()] + 1
    found = ((by_input - zero) * tensors["scales"].float()[tensors["g_idx"].long()]).T
    expected = quantize_groups(weight, INT4, GROUP).dequantize(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)

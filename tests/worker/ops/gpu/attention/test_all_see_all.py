"""The Triton kernels for causal attention compute attention among all patches of an image like plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.operations import FAST
from worker.vision import attention
from worker.vision.attention import Queries, Windows


@pytest.mark.parametrize(("rows", "heads", "size"), [(70, 1, 24), (20, 1, 72), (5, 3, 16)])
def test_every_row_sees_all(rows: int, heads: int, size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.attention.triton import attention_triton

    monkeypatch.setattr(attention, "GROUP", attention.GROUP_GPU)
    qkv = torch.randn(rows, 3 * heads * size, generator=torch.Generator().manual_seed(0))
    operations = replace(FAST, attention=attention_triton)
    queries = Queries.of(qkv.to(device), heads, Windows((rows,)), operations)
    found = queries.attend(slice(0, rows), operations).cpu()
    q, k, v = qkv.view(rows, 3, heads, size).permute(1, 2, 0, 3)
    expected = scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)

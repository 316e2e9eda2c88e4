"""Layers of Gemma 4: attention and the MLP each have a norm before and after them, as in Gemma's text models.

Heads of queries, keys and values are normed; scores are not scaled; inputs and outputs of linears may be clamped.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.vision.activations import gated
from worker.vision.attention import ATTENTION_COST, ROWS, Queries
from worker.vision.spec import VisionSpec
from worker.vision.windows import Windows


@dataclass(frozen=True, slots=True)
class ClampedLinear:
    """A linear whose inputs and outputs are clamped to these ranges."""

    linear: PackedLinear
    inputs: tuple[float, float] = (-inf, inf)
    outputs: tuple[float, float] = (-inf, inf)

    def of(self, x: Tensor, do: Operations) -> Tensor:
        return _clamped(do.linear(_clamped(x, self.inputs), self.linear), self.outputs)


def _clamped(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    return x if bounds == (-inf, inf) else x.clamp(*bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichLayer:
    """The weights of a layer. All norms are RMS norms: [H], and [D] for heads."""

    before_attention: Tensor
    q: ClampedLinear
    k: ClampedLinear
    v: ClampedLinear
    q_norm: Tensor
    k_norm: Tensor
    v_norm: Tensor  # ones
    o: ClampedLinear
    after_attention: Tensor
    before_mlp: Tensor
    gate: ClampedLinear
    up: ClampedLinear
    down: ClampedLinear
    after_mlp: Tensor

    def forward(
        self, norm: Tensor | None, h: Tensor, x: Tensor, seen: Windows, tables: tuple[Tensor, Tensor] | None,
        spec: VisionSpec, do: Operations,
    ) -> Generator[int, None, tuple[Tensor, Tensor]]:  # fmt: skip
        """Does what EncoderLayer.forward does (encoder.py)."""
        parts = [slice(first, min(first + ROWS, len(h))) for first in range(0, len(h), ROWS)]
        heads = (self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm)
        head, eps = spec.hidden_size // spec.heads, spec.norm_eps
        qkv = []
        for part in parts:
            found = (do.rms_norm(each.of(h[part], do).view(-1, head), weight, eps) for each, weight in heads)
            qkv.append(torch.cat([each.view(-1, spec.hidden_size) for each in found], dim=1))
            yield 3 * h[part].numel() * spec.hidden_size
        queries = Queries.of(torch.cat(qkv), spec.heads, seen, do, tables, scale=1.0)
        normed, streams = [], []
        for part in parts:
            mixed = self.o.of(queries.attend(part, do), do)
            mixed, stream = do.add_rms_norm(mixed, x[part], self.before_mlp, eps, x_norm=self.after_attention)
            wide = torch.cat([self.gate.of(mixed, do), self.up.of(mixed, do)], dim=1)
            down = self.down.of(gated(wide, spec.activation, do), do)
            mixed, stream = do.add_rms_norm(down, stream, norm, eps, x_norm=self.after_mlp)
            normed.append(mixed)
            streams.append(stream)
            linears = spec.hidden_size + 3 * spec.intermediate_size
            yield stream.numel() * (2 * ATTENTION_COST * max(seen.lengths) + linears)
        return torch.cat(normed), torch.cat(streams)

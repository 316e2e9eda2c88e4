"""Connectors: each joins the squares of patches of an encoded picture into vectors of the text model's width."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.vision.spec import Connector, VisionSpec


@dataclass(frozen=True, slots=True)
class ConnectorWeights:
    """projection: to the text model's width. norm [H]: of an average; None for connectors without one."""

    projection: PackedLinear
    norm: Tensor | None = None


def _squares(x: Tensor, spec: VisionSpec) -> Tensor:
    """Returns the patches [grid * grid, H] as [squares down, side, squares across, side, H]."""
    squares = spec.grid // spec.side
    return x.view(squares, spec.side, squares, spec.side, x.shape[1])


def shuffle(x: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Lays the patches of a square one after another ("pixel shuffle"), and projects them. Idefics3."""
    joined = _squares(x, spec).transpose(1, 2).reshape(spec.tokens, spec.side**2 * x.shape[1])
    return do.linear(joined, weights.projection)


def pool(x: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Averages the patches of a square, norms the average, and projects it. Gemma 3."""
    squares, total = _squares(x, spec).float(), None
    for down in range(spec.side):  # one addition after another, so that the order is always the same
        for across in range(spec.side):
            part = squares[:, down, :, across]
            total = part if total is None else total + part
    assert total is not None and weights.norm is not None
    average = (total / spec.side**2).reshape(spec.tokens, x.shape[1]).to(x.dtype)
    return do.linear(do.rms_norm(average, weights.norm, spec.norm_eps, offset=True), weights.projection)


CONNECTORS: Mapping[Connector, Callable[[Tensor, ConnectorWeights, VisionSpec, Operations], Tensor]] = {
    "shuffle": shuffle, "pool": pool,
}  # fmt: skip

"""Computes tables of rotary embeddings and of the factors that scale queries, float32, with one row per position.

The kinds of rotary embeddings differ in their inverse frequencies and in the magnitude of cos and sin.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.spec import QueryScaling, RopeSpec

Device = torch.device | str


def tables(spec: RopeSpec, head_dim: int, positions: int, device: Device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of position * inverse frequency, each [positions, head_dim] float32.

    Both halves of a row are equal. Dimensions that are not rotated have cos 1 and sin 0. The tables are computed on the
    CPU, so that every device uses the same bits.
    """
    head_dim = spec.head_dim or head_dim
    rotated = 0 if spec.kind == "none" else spec.rotated or head_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec, rotated)  # [M, R/2]
    unrotated = (0, (head_dim - rotated) // 2)
    cos = pad(angles.cos() * spec.magnitude, unrotated, value=1.0)  # [M, D/2]
    sin = pad(angles.sin() * spec.magnitude, unrotated)
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((sin, sin), dim=-1).to(device)


def at_columns(found: list[tuple[Tensor, Tensor]], positions: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Returns tables [T, D] whose column d in row t is column d of the table `found` at position positions[t, d].

    positions: [T, D]; None: the tables `found` are returned
    """
    if positions is None:
        return found
    return [(cos.gather(0, positions), sin.gather(0, positions)) for cos, sin in found]


def query_scales(scaling: QueryScaling | None, positions: int, device: Device) -> Tensor | None:
    """Returns the factor by which queries are multiplied at each position, float32; None if all factors are 1."""
    if scaling is None or positions <= scaling.positions:
        return None
    steps = torch.arange(positions) // scaling.positions
    return (1 + scaling.beta * (1 + steps).float().log()).to(device)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Returns the radians per position for each pair of dimensions, [head_dim / 2] float32.

    head_dim: how many dimensions of a head are rotated.
    """
    plain = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / max(head_dim, 1)))
    if spec.kind == "longrope":
        return plain / torch.tensor(spec.factors)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "proportional":
        return torch.where(torch.arange(len(plain)) < spec.pairs, plain / spec.factor, 0.0)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends between them (Llama 3.1)."""
    turns = spec.original_positions / (2 * math.pi / plain)  # full rotations of each pair over the original positions
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Keeps pairs that rotate often, stretches pairs that rotate seldom, and blends between them (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(spec.original_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / spec.factor * stretch + plain * (1 - stretch)

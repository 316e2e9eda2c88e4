"""Tables of rotary angles, float32, a row per position. Kinds differ only in their inverse frequencies."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.model.spec import RopeSpec

Device = torch.device | str


def tables(spec: RopeSpec, head_dim: int, positions: int, device: Device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inverse frequency, each [positions, head_dim] float32; both halves of a row are equal.

    They are computed on the CPU, so that every device rotates by the same bits. Unrotated pairs have 1 and 0.
    """
    rotated = 0 if spec.kind == "none" else spec.rotated or head_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec, rotated)  # [M, R/2]
    unrotated = (0, (head_dim - rotated) // 2)
    cos = pad(angles.cos() * spec.magnitude, unrotated, value=1.0)  # [M, D/2]
    sin = pad(angles.sin() * spec.magnitude, unrotated)
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((sin, sin), dim=-1).to(device)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32. head_dim: rotated dimensions."""
    plain = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / max(head_dim, 1)))
    if spec.kind == "longrope":
        return plain / torch.tensor(spec.factors)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretches long waves by `factor`, keeps short ones, and blends between them (the scheme of Llama 3.1)."""
    turns = spec.original_positions / (2 * math.pi / plain)  # how often each pair turned over the original positions
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Keeps pairs that turned often, stretches pairs that turned seldom, with a ramp between (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(spec.original_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / spec.factor * stretch + plain * (1 - stretch)

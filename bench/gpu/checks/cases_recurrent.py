"""Test cases for recurrent layers: gated delta rule, Mamba-2, short convolution, with the shapes of real models.

Three sequences run in one step: a prompt, a decode and a short chunk. All begin without a state.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu.checks.random_inputs import EPS, Case, RandomTensors
from bench.gpu.environment import Environment
from worker.ops.recurrent import delta_net, mamba2, short_conv
from worker.ops.recurrent.reference import (
    DeltaNetWeights,
    Mamba2Weights,
    delta_net_torch,
    mamba2_torch,
    short_conv_torch,
)
from worker.ops.recurrent_state import NO_STATE, DeltaNetShape, Mamba2Shape, RecurrentState, ShortConvShape, StateSlots
from worker.spec import RecurrentShape

LENGTHS = (33, 1, 5)  # rows of each sequence
SHAPES: tuple[DeltaNetShape | Mamba2Shape | ShortConvShape, ...] = (
    DeltaNetShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),  # Qwen3-Next
    DeltaNetShape(key_heads=4, value_heads=4, key_dim=96, value_dim=64, taps=2),
    Mamba2Shape(heads=48, head_dim=64, groups=1, state_size=128, taps=4),  # Granite 4
    Mamba2Shape(heads=6, head_dim=80, groups=2, state_size=16, taps=4),
    ShortConvShape(2048, 3),  # LFM2
    ShortConvShape(101, 4),
)


def recurrent_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    for shape in SHAPES if env.cuda else SHAPES[1::2]:
        match shape:
            case DeltaNetShape():
                yield _delta_net(random, shape)
            case Mamba2Shape():
                yield _mamba2(random, shape)
            case ShortConvShape():
                yield _short_conv(random, shape)


def _delta_net(random: RandomTensors, shape: DeltaNetShape) -> Case:
    rows, wide = sum(LENGTHS), torch.float32
    projected, gates = random(rows, sum(shape.projected)), random(rows, sum(shape.gates))
    weights = DeltaNetWeights(
        conv=random(shape.taps, shape.channels, dtype=wide), decay=-random(shape.value_heads, dtype=wide).abs(),
        dt_bias=random(shape.value_heads, dtype=wide), norm=random(shape.value_dim),
    )  # fmt: skip

    def run(form: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor]:
        return (form(*inputs, weights, shape, *_states(shape, inputs[0]), EPS),)

    return Case(
        f"delta_net {shape}",
        lambda: run(delta_net, projected, gates),
        lambda: run(delta_net_torch, projected.float(), gates.float()),
    )


def _mamba2(random: RandomTensors, shape: Mamba2Shape) -> Case:
    rows, wide = sum(LENGTHS), torch.float32
    projected, steps = random(rows, sum(shape.projected)), random(rows, shape.heads)
    weights = Mamba2Weights(
        conv=random(shape.taps, shape.channels, dtype=wide), conv_bias=random(shape.channels, dtype=wide),
        decay=-random(shape.heads, dtype=wide).abs(), dt_bias=random(shape.heads, dtype=wide),
        skip=random(shape.heads, dtype=wide), norm=random(shape.values),
    )  # fmt: skip

    def run(form: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor]:
        return (form(*inputs, weights, shape, *_states(shape, inputs[0]), EPS),)

    return Case(
        f"mamba2 {shape}",
        lambda: run(mamba2, projected, steps),
        lambda: run(mamba2_torch, projected.float(), steps.float()),
    )


def _short_conv(random: RandomTensors, shape: ShortConvShape) -> Case:
    projected = random(sum(LENGTHS), 3 * shape.channels)
    weight = random(shape.taps, shape.channels, dtype=torch.float32)

    def run(form: Callable[..., Tensor], x: Tensor) -> tuple[Tensor]:
        return (form(x, weight, *_states(shape, x)),)

    return Case(
        f"short_conv {shape}", lambda: run(short_conv, projected), lambda: run(short_conv_torch, projected.float())
    )


def _states(shape: RecurrentShape, x: Tensor) -> tuple[RecurrentState, StateSlots]:
    """Returns new states, and the slots of a step in which each sequence begins."""

    def ints(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(x.device)

    count = len(LENGTHS)
    begins = [sum(LENGTHS[:number]) for number in range(count + 1)]
    slots = StateSlots(ints(*[NO_STATE] * count), ints(*range(1, count + 1)), ints(*begins))
    return RecurrentState.zeros(shape, count + 1, x.dtype, x.device), slots

"""The MLP: two linears with an activation between them, and often with a gate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from worker.checkpoint.stored_weight import PlainWeight, Shape, StackedLinear
from worker.models.layer_kinds import FeedForward, LayerContext, LayerNames, SmallWeight, StoredPart
from worker.ops.linear.packed import PackedLinear
from worker.spec import LayerSpec, ModelSpec

SHARED_MLP = "shared_mlp.input_linear"  # Granite 4: part of the shared expert, or of the MLP in a model without experts
FUSED = "mlp.gate_up_proj"
XIELU: Mapping[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeights:
    """The weights of an MLP. H: hidden size; I: intermediate size. Comments begin with the names in checkpoints."""

    kind: ClassVar[str] = "dense"
    gate_up: PackedLinear  # gate_proj, up_proj: H → 2 I; up_proj: H → I if there is no gate
    down: PackedLinear  # down_proj: I → H
    activation: Tensor | None = None  # act_fn: the parameters of xielu, [4] float32; None for other activations

    @property
    def first(self) -> PackedLinear:
        return self.gate_up

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from (self.gate_up, self.down)


def forward(h: Tensor, x: Tensor, own: DenseWeights, step: LayerContext) -> tuple[Tensor, PackedLinear | None]:
    return inner(h, own, step), own.down


def inner(h: Tensor, own: DenseWeights, step: LayerContext) -> Tensor:
    """Returns the input [T, I] of the MLP's last linear."""
    do, activation = step.do, step.spec.activation
    if step.spec.gated:
        return do.gated_linear(h, own.gate_up, activation)
    return do.activate(do.linear(h, own.gate_up), activation, own.activation)


def mlp_linears(module: str, size: int, spec: ModelSpec, *, fused: bool) -> dict[str, StackedLinear]:
    """Returns an MLP's linears. module: prefix of their names; size: I; fused: true if gate and up are one linear."""
    apart = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
    names = [module + name for name in (("gate_up_proj",) if fused and spec.gated else apart)]
    rows = ((1 + spec.gated) * size // len(names),) * len(names)
    gate_up = StackedLinear(tuple(names), rows, spec.hidden_size, spec.mlp_bias)
    down = StackedLinear((f"{module}down_proj",), (spec.hidden_size,), size, spec.mlp_bias)
    return {"gate_up": gate_up, "down": down}


def linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    size, fused = layer.intermediate_size or spec.intermediate_size, {FUSED, SHARED_MLP} & names.modules
    return mlp_linears("mlp.", size, spec, fused=bool(fused))


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    if spec.activation != "xielu":
        return {}
    parts = [PlainWeight(f"{prefix}mlp.act_fn.{name}", shape) for name, shape in XIELU.items()]
    return {"activation": SmallWeight(parts, exact=True)}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> DenseWeights:
    return DenseWeights(**packed, activation=_xielu(*small["activation"]) if small else None)


def _xielu(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Returns the parameters of xielu (ops/activation). The arguments are as stored: before softplus."""
    return torch.cat((softplus(alpha_p), beta + softplus(alpha_n), beta[None], eps[None]))


def in_c(own: DenseWeights, spec: ModelSpec) -> dict[str, Any]:
    return {"gate_up": own.gate_up.cpu, "down": own.down.cpu, "activation": own.activation}


FEED_FORWARD = FeedForward(
    stored=StoredPart(weights=DenseWeights, linears=linears, small=_small, make=_make), forward=forward, in_c=in_c
)

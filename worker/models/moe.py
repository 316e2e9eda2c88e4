"""A mixture of experts: for each row, the router chooses a few experts, whose weighted outputs are summed.

Some models add a shared expert that every row uses. In Gemma 4, each layer has an MLP beside the experts. The MLP and
the experts then have norms of their own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.kernels.experts import Experts, PackedExperts
from worker.kernels.experts import in_c as experts_in_c
from worker.kernels.linear import PackedLinear
from worker.kernels.weights.quantize import divided
from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.model.checkpoint.stored_weight import PlainWeight
from worker.model.config_values import counted
from worker.model.family import Config, FamilyExperts
from worker.model.feed_forward import dense
from worker.model.feed_forward.dense import DenseWeights
from worker.model.feed_forward.expert_modules import expert_linears, router_linear, spelling
from worker.model.feed_forward.kinds import FeedForward
from worker.model.layer_names import LayerNames, norm, norm_weights
from worker.model.layer_parts import SmallWeight, Step, StoredPart
from worker.spec import ExpertsSpec, LayerSpec, ModelSpec

NORMS = {  # field of BesideNorms → module in a checkpoint
    "after_dense": "post_feedforward_layernorm_1", "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
}  # fmt: skip
GATE_UP, DOWN = "expert_gate_up", "expert_down"  # the names of two fields, each with one linear of all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideNorms:
    """The norms [H] of a layer with experts beside an MLP (Gemma 4). Comments begin with the names in checkpoints."""

    after_dense: Tensor  # post_feedforward_layernorm_1: norms the MLP's output before the experts' output is added
    before_router: Tensor  # router.scale / sqrt(H)
    before_experts: Tensor  # pre_feedforward_layernorm_2
    after_experts: Tensor  # post_feedforward_layernorm_2


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The weights of a mixture of experts.

    shared: the shared expert or, if there are `norms`, the MLP beside the experts; None: the layer has neither of them
    """

    kind: ClassVar[str] = "experts"
    experts: Experts
    shared: DenseWeights | None = None
    shared_gate: PackedLinear | None = None  # shared_expert_gate: H → 1
    norms: BesideNorms | None = None

    @property
    def first(self) -> PackedLinear | None:
        return None if self.shared is None else self.shared.first

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]:
        if self.shared is not None:
            yield from self.shared.linears
        if self.shared_gate is not None:
            yield self.shared_gate
        yield from (self.experts.router, self.experts.gate_up, self.experts.down)


def forward(h: Tensor, x: Tensor, own: MixtureWeights, step: Step) -> tuple[Tensor, PackedLinear | None]:
    do, spec = step.do, step.spec.experts
    assert spec is not None
    added = None
    if own.shared is not None:
        added = do.whole_linear(do.all_columns(dense.inner(h, own.shared, step)), own.shared.down)
    if own.norms is not None and added is not None:
        return _beside_mlp(added, x, own.experts, own.norms, step), None
    gate = None if own.shared_gate is None else do.linear(h, own.shared_gate, fp32_out=True)
    mixed = do.experts(
        h, own.experts, spec.chosen, step.spec.activation, normalized=spec.normalized, sigmoid=spec.sigmoid,
        add=added, add_gate=gate,
    )  # fmt: skip
    return mixed, None


def _beside_mlp(added: Tensor, x: Tensor, experts: Experts, norms: BesideNorms, step: Step) -> Tensor:
    """Computes the experts and returns their normed output plus the normed output of the MLP, [T, H].

    added: the output of the MLP [T, H]
    x: the residual stream [T, H], which router and experts read through norms of their own
    """
    do, spec, eps, offset = step.do, step.spec.experts, step.spec.norm_eps, step.spec.norm_offset
    assert spec is not None
    chosen = do.experts(
        do.rms_norm(x, norms.before_experts, eps, offset=offset), experts, spec.chosen, step.spec.activation,
        normalized=spec.normalized, router_input=do.rms_norm(x, norms.before_router, eps),
    )  # fmt: skip
    added = do.rms_norm(added, norms.after_dense, eps, offset=offset)
    return do.add_rms_norm(chosen, added, None, eps, offset=offset, x_norm=norms.after_experts)[1]


def _sizes(row: FamilyExperts, chosen: str, config: Config) -> ExpertsSpec:
    scoring = "sigmoid" if row.sigmoid else "softmax"
    if config.get("scoring_func") not in (scoring, None):
        raise UnsupportedModel(f"scoring_func {config['scoring_func']!r} is not supported; supported is {scoring!r}")
    count_name = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    count, of_row = config[count_name] or 0, config[chosen] or 0
    if not 0 < of_row <= count:
        raise UnsupportedModel(f"the config chooses {of_row} of {count} experts ({chosen}, {count_name})")
    return ExpertsSpec(
        count=count,
        chosen=of_row,
        intermediate_size=counted(config, row.size),
        normalized=config["norm_topk_prob"] if row.normalized is None else row.normalized,
        sigmoid=row.sigmoid,
        choice_bias=row.choice_bias(config),
        factor=config[row.factor] if row.factor else 1.0,
        router_bias=row.biases,
        bias=row.biases,
        shared_size=counted(config, row.shared_size) if row.shared_size else 0,
        shared_gated=bool(row.shared_size) and row.shared_gated,
        beside_mlp=row.beside_mlp,
        transposed=row.transposed,
    )


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    assert spec.experts is not None
    return spec.experts


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    of, hidden, found = experts_of(spec), spec.hidden_size, dict[str, StackedLinear]()
    if of.beside_mlp:
        found = dense.linears(spec, layer, names)
    elif of.shared_size:
        in_mlp = dense.SHARED_MLP in names.modules
        found = dense.mlp_linears("mlp." if in_mlp else "mlp.shared_expert.", of.shared_size, spec, fused=in_mlp)
    if of.shared_gated:
        found["shared_gate"] = StackedLinear(("mlp.shared_expert_gate",), (1,), hidden, False, exact=True)
    return found | {"router": router_linear(of, hidden, spelling(names.modules))}


def _stacks(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, Sequence[StackedLinear]]:
    gate_up, down = expert_linears(experts_of(spec), spec.hidden_size, spelling(names.modules))
    return {GATE_UP: gate_up, DOWN: down}


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    of, hidden = experts_of(spec), spec.hidden_size
    if of.choice_bias:
        name = prefix + spelling(names.modules).choice_bias
        return {"choice_bias": SmallWeight([PlainWeight(name, (of.count,))], exact=True)}
    if not of.beside_mlp:
        return {}
    norms = {field: SmallWeight(norm_weights(spec, prefix + module, hidden)) for field, module in NORMS.items()}
    scales = SmallWeight([PlainWeight(f"{prefix}router.per_expert_scale", (of.count,))], exact=True)
    router = SmallWeight([PlainWeight(f"{prefix}router.scale", (hidden,))])
    return norms | {"before_router": router, "scales": scales}


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> MixtureWeights:
    of, device = experts_of(spec), like.device
    experts = Experts(
        packed["router"], packed[GATE_UP], packed[DOWN],
        scales=None if of.factor == 1 else torch.full((of.count,), of.factor, dtype=torch.float32, device=device),
        choice_bias=small["choice_bias"][0] if of.choice_bias else None,
    )  # fmt: skip
    shared = DenseWeights(gate_up=packed["gate_up"], down=packed["down"]) if "down" in packed else None
    if not of.beside_mlp:
        return MixtureWeights(experts=experts, shared=shared, shared_gate=packed.get("shared_gate"))
    # The router's input is normed without a weight, then multiplied by a factor. Together they equal one norm with a
    # weight.
    (factor,), (scales,) = small["before_router"], small["scales"]
    before = divided(factor.float(), math.sqrt(spec.hidden_size)).to(factor.dtype)
    norms = BesideNorms(before_router=before, **{field: norm(spec, small[field]) for field in NORMS})
    return MixtureWeights(experts=replace(experts, scales=scales), shared=shared, norms=norms)


def _in_c(own: MixtureWeights, spec: ModelSpec) -> dict[str, Any]:
    of, norms = experts_of(spec), own.norms
    fields = {} if own.shared is None else dense.in_c(own.shared, spec)
    if norms is not None:
        fields |= {name: getattr(norms, name) for name in (*NORMS, "before_router")}
    experts = experts_in_c(own.experts, of.chosen, spec.activation, normalized=of.normalized, sigmoid=of.sigmoid)
    return fields | {"shared_gate": own.shared_gate and own.shared_gate.cpu, "experts": experts}


def _counting(own: MixtureWeights, loads: Tensor) -> MixtureWeights:
    return replace(own, experts=replace(own.experts, loads=loads))


FEED_FORWARD = FeedForward(
    sizes=_sizes,
    stored=StoredPart(weights=MixtureWeights, linears=_linears, stacks=_stacks, small=_small, make=_make),
    forward=forward,
    in_c=_in_c,
    counting=_counting,
)

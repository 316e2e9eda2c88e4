"""A mixture of experts: for each row, the router chooses a few experts, whose weighted outputs are summed.

Some models add a shared expert that every row uses. In Gemma 4, each layer has an MLP as well as experts, and each of
them has norms of its own.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import PlainWeight, StackedLinear
from worker.models import mlp
from worker.models.config_values import counted, shown, single
from worker.models.family import Config, FamilyExperts
from worker.models.layer_kinds import FeedForward, LayerContext, LayerNames, SmallWeight, StoredPart, norm, norm_weights
from worker.models.mlp import DenseWeights
from worker.ops.linear.packed import PackedLinear, pack_stacked
from worker.ops.moe.packed import Experts, PackedExperts
from worker.ops.moe.packed import in_c as experts_in_c
from worker.ops.native import MAX_GROUPS
from worker.ops.quantized_weight import divided
from worker.spec import ExpertGroups, ExpertsSpec, LayerSpec, ModelSpec

NORMS = {  # field of BesideNorms → module in a checkpoint
    "after_dense": "post_feedforward_layernorm_1", "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
}  # fmt: skip
GATE_UP, DOWN = "expert_gate_up", "expert_down"  # the names of two fields, each with one linear of all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideNorms:
    """The norms [H] of a layer with both experts and an MLP (Gemma 4). Comments begin with the names in checkpoints."""

    after_dense: Tensor  # post_feedforward_layernorm_1: norms the MLP's output before the experts' output is added
    before_router: Tensor  # router.scale / sqrt(H)
    before_experts: Tensor  # pre_feedforward_layernorm_2
    after_experts: Tensor  # post_feedforward_layernorm_2


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """The weights of a mixture of experts.

    shared: the shared expert or, if there are `norms`, the layer's MLP; None: the layer has neither of them
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


def forward(h: Tensor, x: Tensor, own: MixtureWeights, step: LayerContext) -> tuple[Tensor, PackedLinear | None]:
    do, spec = step.do, step.spec.experts
    assert spec is not None
    added = None
    if own.shared is not None:
        added = do.whole_linear(do.all_columns(mlp.inner(h, own.shared, step)), own.shared.down)
    if own.norms is not None and added is not None:
        return _beside_mlp(added, x, own.experts, own.norms, step), None
    gate = None if own.shared_gate is None else do.linear(h, own.shared_gate, fp32_out=True)
    mixed = do.experts(
        h, own.experts, spec.chosen, step.spec.activation, normalized=spec.normalized, sigmoid=spec.sigmoid,
        groups=spec.groups, gated=step.spec.gated, add=added, add_gate=gate,
    )  # fmt: skip
    return mixed, None


def _beside_mlp(added: Tensor, x: Tensor, experts: Experts, norms: BesideNorms, step: LayerContext) -> Tensor:
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
    count, of_row = single(config, count_name), single(config, chosen)
    if not 0 < of_row <= count:
        raise UnsupportedModel(f"the config chooses {of_row} of {count} experts ({chosen}, {count_name})")
    shared_size = counted(config, row.shared_size) if row.shared_size and config[row.shared_size] != 0 else 0
    return ExpertsSpec(
        count=count,
        chosen=of_row,
        intermediate_size=counted(config, row.size),
        normalized=config["norm_topk_prob"] if row.normalized is None else row.normalized,
        sigmoid=row.sigmoid,
        choice_bias=row.choice_bias(config),
        groups=_groups(row, of_row, count, config),
        factor=config[row.factor] if row.factor else 1.0,
        router_bias=row.biases,
        bias=row.biases,
        shared_size=shared_size,
        shared_gated=bool(row.shared_size) and row.shared_gated,
        beside_mlp=row.beside_mlp,
        transposed=row.transposed,
    )


def _groups(row: FamilyExperts, chosen: int, count: int, config: Config) -> ExpertGroups | None:
    """Returns the groups of experts from which the router chooses; None: it chooses from all. Raises UnsupportedModel.

    chosen, count: how many experts are chosen for a row, and how many there are
    """
    groups, of_groups, method = (config.get(name) for name in ("n_group", "topk_group", "topk_method"))
    if method not in row.methods:
        raise UnsupportedModel(
            f"topk_method {shown(method)} is not supported; supported are {', '.join(map(repr, row.methods))}"
        )
    if groups in (None, 1) or method == "greedy":
        return None
    if not row.group_best:
        raise UnsupportedModel(f"n_group {groups} is not supported in this family; supported is 1")
    size, of_groups = count // groups, of_groups or groups
    if count % groups or groups > MAX_GROUPS or size < row.group_best:
        raise UnsupportedModel(
            f"n_group {groups} is not supported: {count} experts need equal groups of at least {row.group_best}, and "
            f"at most {MAX_GROUPS} of them"
        )
    if of_groups > groups or of_groups * size < chosen:
        raise UnsupportedModel(
            f"topk_group {of_groups} of {groups} groups is not supported: rows choose {chosen} experts"
        )
    return ExpertGroups(groups, of_groups, row.group_best)


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    assert spec.experts is not None
    return spec.experts


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    of, hidden, found = experts_of(spec), spec.hidden_size, dict[str, StackedLinear]()
    if of.beside_mlp:
        found = mlp.linears(spec, layer, names)
    elif of.shared_size:
        in_mlp = mlp.SHARED_MLP in names.modules
        found = mlp.mlp_linears("mlp." if in_mlp else "mlp.shared_expert.", of.shared_size, spec, fused=in_mlp)
    if of.shared_gated:
        found["shared_gate"] = StackedLinear(("mlp.shared_expert_gate",), (1,), hidden, False, exact=True)
    return found | {"router": router_linear(of, hidden, expert_names(names.modules))}


def _stacks(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, Sequence[StackedLinear]]:
    gate_up, down = expert_linears(experts_of(spec), spec.hidden_size, expert_names(names.modules), gated=spec.gated)
    return {GATE_UP: gate_up, DOWN: down}


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    of, hidden = experts_of(spec), spec.hidden_size
    if of.choice_bias:
        name = next((each for each in CHOICE_BIASES if each in names.modules), CHOICE_BIASES[0])
        shape = (1, of.count) if name == ONE_ROW else (of.count,)
        return {"choice_bias": SmallWeight([PlainWeight(prefix + name, shape)], exact=True)}
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
        choice_bias=small["choice_bias"][0].flatten() if of.choice_bias else None,
    )  # fmt: skip
    shared = DenseWeights(gate_up=packed["gate_up"], down=packed["down"]) if "down" in packed else None
    if of.averaged:  # The sigmoid of 0 is 1/2. The weights of the experts include the other 1/2.
        half = pack_stacked([like.new_zeros(1, spec.hidden_size)], dtype=like.dtype, invariant=True)
        return MixtureWeights(experts=experts, shared=shared, shared_gate=half)
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
    fields = {} if own.shared is None else mlp.in_c(own.shared, spec)
    if norms is not None:
        fields |= {name: getattr(norms, name) for name in (*NORMS, "before_router")}
    experts = experts_in_c(
        own.experts, of.chosen, spec.activation, normalized=of.normalized, sigmoid=of.sigmoid, groups=of.groups
    )  # fmt: skip
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


# Finds the modules of a layer's experts and router in a checkpoint. Checkpoints name these modules in several ways.


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the modules in one kind of checkpoint, with {} for the number of the expert.

    gate_up: the names of gate and up, or one name if both are one linear
    interleaved: if true, rows of gate and up alternate, and plain numbers are stored as [inputs, outputs] (gpt-oss)
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    interleaved: bool = False

    @property
    def of_first(self) -> list[str]:
        """The names of the modules of the router and of the first expert."""
        return [self.router, *(module.format(0) for module in (*self.gate_up, self.down))]


_DOWN, _FUSED = "mlp.experts.{}.down_proj", ("mlp.experts.{}.gate_up_proj",)
_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
_MIXTRAL = "block_sparse_moe.experts.{}."
_LFM2 = "feed_forward.experts.{}."
_GRANITE = "block_sparse_moe.{}put_linear.{{}}"
SPELLINGS = (
    ExpertNames("mlp.gate", _GATE_UP, _DOWN),  # Qwen, and all GGUF files
    ExpertNames("block_sparse_moe.gate", (_MIXTRAL + "w1", _MIXTRAL + "w3"), _MIXTRAL + "w2"),
    ExpertNames("feed_forward.gate", (_LFM2 + "w1", _LFM2 + "w3"), _LFM2 + "w2"),
    ExpertNames("block_sparse_moe.router.layer", (_GRANITE.format("in"),), _GRANITE.format("out")),
    ExpertNames("mlp.router", _FUSED, _DOWN, interleaved=True),  # gpt-oss
    ExpertNames("mlp.gate", _FUSED, _DOWN),  # the names that transformers 5 has in memory and may save
    ExpertNames("router.proj", ("experts.{}.gate_up_proj",), "experts.{}.down_proj"),  # Gemma 4
    ExpertNames("router.proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"),
    ExpertNames("router.proj", ("moe.experts.{}.gate_proj", "moe.experts.{}.up_proj"), "moe.experts.{}.down_proj"),
)  # fmt: skip
# The names of the tensor with the biases by which experts are chosen. GGUF files have the first one.
CHOICE_BIASES = (
    "mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", "mlp.expert_bias",
    "mlp.moe_statics.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias", "feed_forward.expert_bias",
)  # fmt: skip
ONE_ROW = "mlp.moe_statics.e_score_correction_bias"  # of CHOICE_BIASES, the one whose tensor is [1, E]


def expert_names(modules: Collection[str]) -> ExpertNames:
    """Returns how a checkpoint names its experts: the one with the most names that are in `modules`.

    modules: the names of the modules in the checkpoint's layers. Only the router and the first expert are looked up.
    """
    return max(SPELLINGS, key=lambda one: sum(module in modules for module in one.of_first))


def router_linear(spec: ExpertsSpec, hidden: int, names: ExpertNames) -> StackedLinear:
    return StackedLinear((names.router,), (spec.count,), hidden, spec.router_bias, exact=True)


def expert_linears(
    spec: ExpertsSpec, hidden: int, names: ExpertNames, *, gated: bool
) -> tuple[list[StackedLinear], list[StackedLinear]]:
    """Returns two lists with an entry for each expert: the stacked gate and up, or up alone, and the down one."""
    inner = spec.intermediate_size
    inputs = names.gate_up if gated else names.gate_up[-1:]
    rows = ((1 + gated) * inner // len(inputs),) * len(inputs)
    order = torch.arange(2 * inner).view(inner, 2).T.flatten() if names.interleaved else None
    transposed = None if spec.transposed and names.gate_up == _FUSED else names.interleaved
    gate_up, down = [], []
    for expert in range(spec.count):
        both = tuple(module.format(expert) for module in inputs)
        gate_up.append(StackedLinear(both, rows, hidden, spec.bias, order, transposed))
        module = (names.down.format(expert),)
        down.append(StackedLinear(module, (hidden,), inner, spec.bias, transposed=transposed))
    return gate_up, down

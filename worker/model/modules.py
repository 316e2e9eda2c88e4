"""Which modules of a checkpoint a layer consists of, under the names that Hugging Face gives them.

The modules of experts are in expert_modules.py, those of recurrent layers in delta_modules.py, those of per-layer
embeddings in layer_inputs.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from worker.kernels.delta_net import DeltaNetShape
from worker.kernels.mamba2 import Mamba2Shape
from worker.kernels.short_conv import ShortConvShape
from worker.model.delta_modules import INTERLEAVED, delta_linears
from worker.model.layer_inputs import layer_input_linears
from worker.model.mamba_modules import mamba_linears
from worker.model.spec import LayerSpec, ModelSpec
from worker.model.stacked_linear import WEIGHT, StackedLinear
from worker.model.stored_weight import PlainWeight, Shape

_PRE = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_POST = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {**_POST, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
_GLM = {**_PRE, "after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}
_BESIDE_MLP = {  # norms where a layer has experts beside the MLP (Gemma 4)
    "after_dense": "post_feedforward_layernorm_1", "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
}  # fmt: skip
OTHER_NAMES = {  # of modules, as some families have them → common name
    "attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm",
    "self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj", "embedding_norm": "norm",
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
_SHARED_MLP = "shared_mlp.input_linear"  # of Granite 4: the MLP, or the shared expert where there are others
_NORMS = {(True, False): _PRE, (False, True): _POST, (True, True): _BOTH}  # by pre_norms and post_norms


@dataclass(frozen=True, slots=True)
class LayerSpelling:
    """How a checkpoint names the modules of its layers, as far as its spec leaves that open.

    fused_qkv: whether q, k and v are one tensor; fused_gate_up: whether gate and up are one; interleaved_delta: the
    modules of recurrent layers that are stored key head by key head (Qwen3-Next); norms: module by field of Layer;
    shared_expert: what the names of the shared expert begin with; others: names that are not the common ones, by
    common name.
    """

    fused_qkv: bool
    fused_gate_up: bool
    interleaved_delta: frozenset[str]
    norms: Mapping[str, str]
    shared_expert: str
    others: Mapping[str, str]

    @classmethod
    def of(cls, spec: ModelSpec, names: Iterable[str]) -> "LayerSpelling":
        """names: of all tensors of the checkpoint."""
        modules = {".".join(name.split(".")[-3:-1]) for name in names}
        parts = {module.rpartition(".")[2] for module in modules}
        glm = _GLM["after_attention"] in parts
        norms = _GLM if glm else _NORMS[spec.pre_norms, spec.post_norms]
        shared = "mlp." if _SHARED_MLP in modules else "mlp.shared_expert."
        gate_up = bool({"mlp.gate_up_proj", _SHARED_MLP} & modules)
        interleaved = frozenset(INTERLEAVED) & modules
        others = {common: other for other, common in OTHER_NAMES.items() if other in modules | parts}
        return cls("self_attn.qkv_proj" in modules, gate_up, interleaved, norms, shared, others)

    def spelled(self, module: str) -> str:
        """Returns the name of a module in the checkpoint from its common name."""
        return self.others.get(module, module)


def layer_linears(spec: ModelSpec, layer: LayerSpec, names: LayerSpelling) -> dict[str, StackedLinear]:
    """Returns the linears of a Layer without its experts, by field name.

    The rows of qkv that are `apart` are those of `gates`.
    """
    found = _common_linears(spec, layer, names)
    return {
        field: replace(linear, modules=tuple(map(names.spelled, linear.modules))) for field, linear in found.items()
    }


def _common_linears(spec: ModelSpec, layer: LayerSpec, names: LayerSpelling) -> dict[str, StackedLinear]:
    if layer.recurrent:
        return _recurrent(spec, names) | _feed_forward(spec, layer, names)
    kv_heads, head_dim = spec.kv_shape(layer)
    q, kv = spec.heads * head_dim, kv_heads * head_dim
    hidden, order = spec.hidden_size, _row_order(spec)
    if layer.shares is not None:
        qkv = StackedLinear(("self_attn.q_proj",), (q,), hidden, spec.qkv_bias)
    elif layer.key_is_value:
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj")
        qkv = StackedLinear(attention, (q, kv, kv), hidden, spec.qkv_bias)
    elif spec.attention_gate:
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv = StackedLinear(attention, (2 * q, kv, kv), hidden, spec.qkv_bias, order, apart=q)
    elif names.fused_qkv:
        qkv = StackedLinear(("self_attn.qkv_proj",), (q + 2 * kv,), hidden, spec.qkv_bias, order)
    else:
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv = StackedLinear(attention, (q, kv, kv), hidden, spec.qkv_bias, order)
    o = StackedLinear(("self_attn.o_proj",), (hidden,), q, spec.o_bias)
    return {"qkv": qkv, "o": o, **_feed_forward(spec, layer, names), **layer_input_linears(spec)}


def _recurrent(spec: ModelSpec, names: LayerSpelling) -> dict[str, StackedLinear]:
    shape, hidden = spec.recurrent, spec.hidden_size
    match shape:
        case DeltaNetShape():
            return delta_linears(shape, hidden, interleaved=names.interleaved_delta)
        case Mamba2Shape():
            return mamba_linears(shape, hidden)
        case ShortConvShape():
            inputs = StackedLinear(("conv.in_proj",), (3 * shape.channels,), hidden, False)
            return {"qkv": inputs, "o": StackedLinear(("conv.out_proj",), (hidden,), shape.channels, False)}
        case None:
            raise AssertionError("a recurrent layer has a shape")


def _feed_forward(spec: ModelSpec, layer: LayerSpec, names: LayerSpelling) -> dict[str, StackedLinear]:
    """Returns the linears that every row is multiplied by: of the MLP, or of the shared expert if there are experts."""
    hidden = spec.hidden_size
    if not layer.sparse or spec.experts is None or spec.experts.beside_mlp:
        return _gated("mlp.", layer.intermediate_size or spec.intermediate_size, spec, fused=names.fused_gate_up)
    if not spec.experts.shared_size:
        return {}
    gate = {"shared_gate": StackedLinear(("mlp.shared_expert_gate",), (1,), hidden, False, exact=True)}
    shared = _gated(names.shared_expert, spec.experts.shared_size, spec, fused=names.shared_expert == "mlp.")
    return shared | (gate if spec.experts.shared_gated else {})


def _gated(module: str, inner: int, spec: ModelSpec, *, fused: bool) -> dict[str, StackedLinear]:
    apart = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
    names = [module + name for name in (("gate_up_proj",) if fused and spec.gated else apart)]
    rows = ((1 + spec.gated) * inner // len(names),) * len(names)
    gate_up = StackedLinear(tuple(names), rows, spec.hidden_size, spec.mlp_bias)
    down = StackedLinear((f"{module}down_proj",), (spec.hidden_size,), inner, spec.mlp_bias)
    return {"gate_up": gate_up, "down": down}


def _row_order(spec: ModelSpec) -> Tensor | None:
    """Returns the row order of queries, gates, keys and values in memory; None if it is that of the checkpoint.

    With output gates, the checkpoint has those of a query head after its queries.
    """
    head, size = _head_order(spec), spec.head_dim
    if head is None and not spec.attention_gate:
        return None
    plain = torch.arange(size)
    head = plain if head is None else head
    step = (1 + spec.attention_gate) * size
    queries, keys = torch.arange(spec.heads)[:, None] * step, torch.arange(spec.kv_heads)[:, None] * size
    gates = queries + size + plain if spec.attention_gate else queries[:0]
    first = spec.heads * step
    parts = (queries + head, gates, first + keys + head, first + spec.kv_heads * size + keys + plain)
    return torch.cat([part.flatten() for part in parts])


def _head_order(spec: ModelSpec) -> Tensor | None:
    """Returns the order of the dimensions of a query or key head in memory; None if it is that of the checkpoint.

    The kernels rotate dimension i of a head together with dimension i + D / 2. A checkpoint may rotate only the first R
    of the D dimensions, and may pair i with i + R / 2, or neighbours with each other. The new order places pairs
    D / 2 apart and fills the gaps with the other dimensions.
    """
    rope, size = spec.ropes[0], spec.head_dim
    if not rope.rotated and not rope.neighbours:
        return None
    rotated = rope.rotated or size
    gap = (size - rotated) // 2
    pairs = torch.arange(rotated).view(-1, 2).T if rope.neighbours else torch.arange(rotated).view(2, -1)
    rest = torch.arange(rotated, size)
    return torch.cat((pairs[0], rest[:gap], pairs[1], rest[gap:]))


def layer_vectors(
    spec: ModelSpec, layer: LayerSpec, prefix: str, names: LayerSpelling
) -> dict[str, Sequence[PlainWeight]]:
    """Returns what the norms and the other small weights of a Layer are made of, by field name."""
    beside_mlp = layer.sparse and spec.experts is not None and spec.experts.beside_mlp
    inputs = {} if spec.layer_inputs is None else {"after_input": "post_per_layer_input_norm"}
    modules = {**names.norms, **(_BESIDE_MLP if beside_mlp else {}), **inputs}
    found = {
        field: norm_weights(spec, prefix + names.spelled(module), spec.hidden_size)
        for field, module in modules.items()
        if field != "before_mlp" or not spec.parallel
    }
    if spec.qk_norm and not layer.recurrent:
        kv_heads, head_dim = spec.kv_shape(layer)
        heads = (spec.heads, kv_heads) if spec.whole_qk_norm else (1, 1)
        for field, count in zip(OF_HEADS if layer.shares is None else OF_HEADS[:1], heads, strict=False):
            module = prefix + names.spelled(f"self_attn.{field}")
            found[field] = norm_weights(spec, module, count * head_dim)
    if spec.sinks and not layer.recurrent:
        found[SINKS] = [PlainWeight(f"{prefix}self_attn.sinks", (spec.heads,))]
    if beside_mlp:
        found["before_router"] = [PlainWeight(f"{prefix}router.scale", (spec.hidden_size,))]
    if spec.layer_scales:
        found["scale"] = [PlainWeight(f"{prefix}layer_scalar", (1,))]
    if layer.recurrent and isinstance(spec.recurrent, ShortConvShape):
        found[CONV] = [PlainWeight(f"{prefix}conv.conv{WEIGHT}", (spec.recurrent.channels, 1, spec.recurrent.taps))]
    if spec.activation == "xielu":
        found[ACTIVATION] = [PlainWeight(f"{prefix}mlp.act_fn.{name}", shape) for name, shape in XIELU.items()]
    return found


def unread(layer: LayerSpec, prefix: str) -> tuple[str, ...]:
    """Returns what the names of tensors of a layer begin with that a checkpoint may have, but the layer does not use.

    A layer that shares the K/V of another one was trained without the projections that some checkpoints have for it.
    """
    shares = ("k_proj.", "v_proj.", "k_norm.", "v_norm.") if layer.shares is not None else ()
    return tuple(f"{prefix}self_attn.{module}" for module in shares)


def norm_weights(spec: ModelSpec, module: str, size: int) -> Sequence[PlainWeight]:
    kinds = (WEIGHT, BIAS) if spec.norm_bias else (WEIGHT,)
    return [PlainWeight(module + kind, (size,)) for kind in kinds]


def layer_vector(spec: ModelSpec, field: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns a vector of a Layer from the tensors of the checkpoint that `layer_vectors` names."""
    if field == SINKS:
        return parts[0]
    if field == ACTIVATION:
        return _xielu(*parts)
    if field == CONV:
        return parts[0][:, 0].T.contiguous()
    if field == "before_router":  # the factor of the router's input, after a norm without a weight
        return (parts[0].float() / math.sqrt(spec.hidden_size)).to(parts[0].dtype)
    if field == "scale":
        return parts[0]
    return norm(spec, parts) if spec.layer_norm else _in_memory_order(spec, field, parts[0])


def norm(spec: ModelSpec, parts: Sequence[Tensor]) -> Tensor:
    """Returns a norm over the hidden size as the kernels read it. The weights of layer norms are stored with offset."""
    if not spec.layer_norm:
        return parts[0]
    bias = parts[1] if spec.norm_bias else torch.zeros_like(parts[0])
    return torch.stack((parts[0] + float(spec.norm_offset), bias))


def _xielu(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Returns the parameters of xielu (kernels/activate.py): the checkpoint has inverses of softplus of its alphas."""
    return torch.cat((softplus(alpha_p), beta + softplus(alpha_n), beta[None], eps[None]))


def _in_memory_order(spec: ModelSpec, field: str, vector: Tensor) -> Tensor:
    """Returns a vector of a Layer with its dimensions in the order in memory."""
    order = _head_order(spec) if field in OF_HEADS else None
    return vector if order is None else vector.view(-1, spec.head_dim)[:, order.to(vector.device)].flatten()


OF_HEADS = ("q_norm", "k_norm")  # the fields of Layer whose vectors belong to the dimensions of heads
SINKS, ACTIVATION, CONV = "sinks", "activation", "conv"
EXACT = (SINKS, ACTIVATION, CONV)  # the fields of Layer that are float32 in any case
BIAS = ".bias"
XIELU: Mapping[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}

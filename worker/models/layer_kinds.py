"""The interface of all kinds of mixers and feed-forward networks: records of functions that the loader and the decoder
call, and the registry of the kinds (MIXERS, FEED_FORWARDS).

A part of a layer is its mixer or its feed-forward network.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.checkpoint.stored_weight import BIAS, WEIGHT, PlainWeight, StackedLinear
from worker.kv_cache.tensors import KVCache
from worker.models.family import Config, FamilyExperts
from worker.models.forward_inputs import ForwardInputs
from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.packed import PackedExperts
from worker.spec import ExpertsSpec, LayerSpec, ModelSpec, RecurrentShape

# Translates the common names of modules to a checkpoint's names, and describes the norms, which all layers have.
#
# Common names are the most frequent names in Hugging Face checkpoints. Each kind of mixer or feed-forward network
# knows the common names of its own modules.

# the modules of the norms, by field of Layer
_PRE = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_POST = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {**_POST, "before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
_GLM = {**_PRE, "after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}
_BEFORE_MLP = {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}  # VaultGemma
_AFMOE = {**_BOTH, "before_mlp": "pre_mlp_layernorm", "after_mlp": "post_mlp_layernorm"}
_CLOVA = {**_PRE, "after_attention": "post_norm1", "after_mlp": "post_norm2"}
# the ways in which checkpoints name the modules of the norms, by pre_norms and post_norms
_NORMS = {
    (True, False): (_PRE, _BEFORE_MLP), (False, True): (_POST,), (True, True): (_BOTH, _GLM, _AFMOE, _CLOVA),
    (False, False): ({},),
}  # fmt: skip
OTHER_NAMES = {  # a module's name in some families → its common name
    "attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm",
    "self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj", "embedding_norm": "norm",
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "mlp.shared_experts.gate_proj": "mlp.shared_expert.gate_proj",
    "mlp.shared_experts.up_proj": "mlp.shared_expert.up_proj",
    "mlp.shared_experts.down_proj": "mlp.shared_expert.down_proj",
    "mlp.gate.wg": "mlp.gate", "mlp.router.gate": "mlp.gate",
    **{f"mlp.shared_mlp.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How a checkpoint names the modules of its layers. The spec alone does not determine these names.

    modules: the names of all modules inside any layer, for example `mlp` and `mlp.up_proj`, and of modules outside; and
        of all tensors in them, for example `mlp.up_proj.weight`
    norms: the module of each norm, by field of Layer
    others: uncommon names, by common name
    """

    modules: frozenset[str]
    norms: Mapping[str, str]
    others: Mapping[str, str]

    @classmethod
    def of(cls, spec: ModelSpec, names: Iterable[str], prefix: str) -> "LayerNames":
        """Finds a checkpoint's names. names: the names of all tensors in it
        prefix: the prefix of the names of its language model's tensors

        Considers only the layers and the last norm of the language model. An encoder of images or sound, and layers
        that draft tokens, have names of their own.
        """
        own = {tuple(name.removeprefix(prefix).split(".")) for name in names if name.startswith(prefix)}
        paths = {path[2:] if path[0] == "layers" else path for path in own if path[0] == "layers" or len(path) == 2}
        modules = frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))
        ways = _NORMS[spec.pre_norms, spec.post_norms]
        norms = max(ways, key=lambda way: sum(module in modules for module in {*way.values()}))
        return cls(modules, norms, {common: other for other, common in OTHER_NAMES.items() if other in modules})

    def spelled(self, module: str) -> str:
        """Returns the checkpoint's name of the module whose common name is `module`."""
        return self.others.get(module, module)


def layer_norms(spec: ModelSpec, layer: LayerSpec, prefix: str, names: LayerNames) -> dict[str, Sequence[PlainWeight]]:
    """Returns the stored tensors of a layer's norms, by field of Layer. prefix: the prefix of its tensor names"""
    absent = {"before_mlp"} if spec.parallel else {"before_mlp", "after_mlp"} if layer.bare else {}
    return {
        field: norm_weights(spec, prefix + names.spelled(module), spec.hidden_size)
        for field, module in names.norms.items()
        if field not in absent
    }


def norm_weights(spec: ModelSpec, module: str, size: int) -> Sequence[PlainWeight]:
    kinds = (WEIGHT, BIAS) if spec.norm_bias else (WEIGHT,)
    return [PlainWeight(module + kind, (size,)) for kind in kinds]


def norm(spec: ModelSpec, parts: Sequence[Tensor]) -> Tensor:
    """Returns a norm over the hidden size as the kernels read it: [H], or [2, H] for a layer norm (weight and bias).

    The weight of a layer norm includes the spec's norm_offset; the kernels add the offset of other norms.
    """
    if not spec.layer_norm:
        return parts[0]
    bias = parts[1] if spec.norm_bias else torch.zeros_like(parts[0])
    return torch.stack((parts[0] + float(spec.norm_offset), bias))


Linears = Iterator[PackedLinear | PackedExperts]


@dataclass(frozen=True, slots=True)
class SmallWeight:
    """A vector or another small tensor of a layer.

    parts: the checkpoint's tensors from which the small weight is made
    exact: if true, the parts are read as float32, whatever the dtype of the model is
    """

    parts: Sequence[PlainWeight]
    exact: bool = False


class Made(Protocol):
    """Makes the weights of a part of a layer.

    packed: the part's linears, by field
    small: the tensors of each small weight, by field
    like: a tensor with the model's dtype and device
    """

    def __call__(
        self, spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]],
        like: Tensor,
    ) -> Any: ...  # fmt: skip


def no_stacks(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, Sequence[StackedLinear]]:
    return {}


def nothing_unpacked(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    return {}


def nothing_derived(spec: ModelSpec, layer: LayerSpec, read: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    return {}


def nothing_unread(layer: LayerSpec) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """How a checkpoint stores a part of a layer, and how the part's weights are made from the stored tensors.

    weights: the type of the record that `make` returns
    linears: returns the linear layers, by their field in `weights`. Rows marked `apart` become the field `gates`.
    stacks: returns the linear layers of all experts, by field: one linear layer for each expert
    unpacked: returns linear layers that are read in full precision, by a name; `derived` makes weights of them
    derived: returns the weights [N, K] of all heads, by field, from the tensors of `unpacked`, by name
    small: returns the small weights, by field. Its last argument is the prefix of the layer's tensor names.
    unread: returns modules that a checkpoint may hold although the part does not use them
    """

    weights: type
    linears: Callable[[ModelSpec, LayerSpec, LayerNames], dict[str, StackedLinear]]
    stacks: Callable[[ModelSpec, LayerSpec, LayerNames], dict[str, Sequence[StackedLinear]]] = no_stacks
    unpacked: Callable[[ModelSpec, LayerSpec, LayerNames], dict[str, StackedLinear]] = nothing_unpacked
    derived: Callable[[ModelSpec, LayerSpec, Mapping[str, Tensor]], dict[str, list[Tensor]]] = nothing_derived
    small: Callable[[ModelSpec, LayerSpec, LayerNames, str], dict[str, SmallWeight]]
    make: Made
    unread: Callable[[LayerSpec], tuple[str, ...]] = nothing_unread

    def spelled_linears(self, spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
        """Returns the linears, with modules named as in the checkpoint."""
        found = self.linears(spec, layer, names)
        return {
            field: replace(linear, modules=tuple(map(names.spelled, linear.modules))) for field, linear in found.items()
        }


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The values that all layers of one forward read."""

    do: Operations
    spec: ModelSpec
    ropes: Sequence[tuple[Tensor, Tensor]]  # cos and sin [positions, D] float32, for each rotary table of the spec
    query_scales: Tensor | None  # [positions] float32
    key_centres: Sequence[Tensor | None]  # of each layer (decoder.py)
    inputs: ForwardInputs
    cache: KVCache


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of a decoder with the values from which its record for the C library is made."""

    index: int
    spec: ModelSpec
    ropes: Sequence[tuple[Tensor, Tensor]]
    key_centre: Tensor | None
    cache: KVCache
    dtype: torch.dtype  # the model's dtype

    @property
    def layer(self) -> LayerSpec:
        return self.spec.layers[self.index]


# Defines the functions of a kind of mixer, and finds a kind by name.
#
# A kind is imported only when a model has layers of that kind.


def no_state(config: Config) -> None:
    """Returns None, because the kind has K/V and no recurrent state. ModelSpec.kv_shape has the shape of K/V."""
    return None


def no_key_bias(own: Any, spec: ModelSpec, layer: LayerSpec) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The functions of a kind of mixer.

    state: reads from a config the shape of a sequence's recurrent state in a layer of this kind; None: the kind has
        K/V instead. Raises UnsupportedModel.
    check: raises UnsupportedModel if sizes are too large for the kernels, or contradict each other
    stored: how a checkpoint stores the weights; their record has the properties of MixerWeights
    forward: writes K/V or states, and returns the mixed rows, which are the input of the linear `o`. Its arguments are
        the normed rows [T, H], the weights, the layer's index, the context, and the tensors of the weights that are
        read next, which may be prefetched.
    runs_in_c: returns whether the C library can compute a layer
    in_c: returns the fields of DecoderCLayer, from the weights and the place of the layer
    key_bias: returns the constant part of a layer's keys before the rotation, [key heads, D] float32; None if they have
        none. Its arguments are the weights, the spec and the layer.
    """

    state: Callable[[Config], RecurrentShape | None] = no_state
    check: Callable[[ModelSpec, LayerSpec], None]
    stored: StoredPart
    forward: Callable[..., Tensor]
    runs_in_c: Callable[[Place], bool]
    in_c: Callable[[Any, Place], dict[str, Any]]
    key_bias: Callable[[Any, ModelSpec, LayerSpec], Tensor | None] = no_key_bias


MIXERS: Mapping[str, str] = {  # kind → its module
    "attention": "worker.models.attention", "latent": "worker.models.latent", "delta_net": "worker.models.delta_net",
    "mamba2": "worker.models.mamba2", "short_conv": "worker.models.short_conv",
}  # fmt: skip


def mixer(kind: str) -> Mixer:
    """Returns the functions of a kind, which is one of MIXERS."""
    found: Mixer = import_module(MIXERS[kind]).MIXER
    return found


# Defines the functions of a kind of feed-forward network, and finds a kind by name.
#
# A kind is imported only when a model has layers of that kind.


def no_sizes(row: FamilyExperts, chosen: str, config: Config) -> None:
    return None


def nothing_to_count(own: Any, loads: Tensor) -> Any:
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The functions of a kind of feed-forward network.

    sizes: reads the sizes of experts from a config. Its arguments are the family's experts, the name of the setting
        for the number of experts per row, and the config. Returns None if the kind has no experts. Raises
        UnsupportedModel.
    stored: how a checkpoint stores the weights; their record has the properties of FeedForwardWeights
    forward: returns (output, None), or (input of the last linear, last linear). Its arguments are the normed rows
        [T, H], the residual stream [T, H], the weights and the context.
    in_c: returns the fields of DecoderCLayer, from the weights
    counting: returns the weights with a counter [E] int64 of the rows that choose each expert, if there are experts
    """

    sizes: Callable[[FamilyExperts, str, Config], ExpertsSpec | None] = no_sizes
    stored: StoredPart
    forward: Callable[..., tuple[Tensor, PackedLinear | None]]
    in_c: Callable[[Any, ModelSpec], dict[str, Any]]
    counting: Callable[[Any, Tensor], Any] = nothing_to_count


FEED_FORWARDS: Mapping[str, str] = {  # kind → its module
    "dense": "worker.models.mlp", "experts": "worker.models.moe", "none": "worker.models.no_feed_forward",
}  # fmt: skip


def feed_forward(kind: str) -> FeedForward:
    """Returns the functions of a kind, which is one of FEED_FORWARDS."""
    found: FeedForward = import_module(FEED_FORWARDS[kind]).FEED_FORWARD
    return found

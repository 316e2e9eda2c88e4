"""Describes a model family: defaults, switches, and functions that read from a config how each layer is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.spec import Activation, ModelSpec

Config = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, CONV = "linear_attention", "conv"  # types of layers with a recurrent state instead of attention


def nth_of(config: Config, name: str) -> int:
    """Returns the value of the setting `name`, which counts layers. Raises UnsupportedModel if it is 0 or no number."""
    if not config[name] or isinstance(config[name], str):
        raise UnsupportedModel(f"{name} {config[name]!r} is not supported; supported are numbers from 1 on")
    return int(config[name])


def every_layer_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def window_everywhere(config: Config) -> list[str]:
    return [SLIDING if config["sliding_window"] else FULL] * config["num_hidden_layers"]


def window_from_layer(config: Config) -> list[str]:
    """If `use_sliding_window` is set, the layers from `max_window_layers` on have a sliding window (Qwen)."""
    first = config["max_window_layers"] if config["use_sliding_window"] else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def window_but_every_nth(config: Config) -> list[str]:
    """Every `sliding_window_pattern`-th layer attends to all positions; the others have a sliding window (Gemma 3)."""
    nth = nth_of(config, "sliding_window_pattern")
    return [SLIDING if (i + 1) % nth else FULL for i in range(config["num_hidden_layers"])]


def window_where_nothing_rotates(config: Config) -> list[str]:
    """If `use_sliding_window` is set, the layers without rotary embeddings have a sliding window (SmolLM3).

    Layers with rotary embeddings attend to all positions.
    """
    windowed = config["use_sliding_window"] and config["sliding_window"]
    return [FULL if rotates or not windowed else SLIDING for rotates in rotates_but_every_nth(config)]


def full_every_nth(config: Config) -> list[str]:
    """Every `full_attention_interval`-th layer has attention; the others have a recurrent state (Qwen3.5)."""
    nth = nth_of(config, "full_attention_interval")
    return [LINEAR if (i + 1) % nth else FULL for i in range(config["num_hidden_layers"])]


def conv_but_listed(config: Config) -> list[str]:
    """The layers in `full_attn_idxs` have attention, the others short convolutions (LFM2). null: all have attention."""
    count, listed = config["num_hidden_layers"], config["full_attn_idxs"]
    return [FULL if listed is None or i in listed else CONV for i in range(count)]


def window_but_every_sixth_and_last(config: Config) -> list[str]:
    count = config["num_hidden_layers"]
    return [SLIDING if (i + 1) % 6 and i + 1 < count else FULL for i in range(count)]


def every_layer_alike(config: Config, types: Sequence[str]) -> list[dict[str, Any]]:
    return [{} for _ in types]


def every_layer_rotates(config: Config) -> list[bool]:
    return [True] * config["num_hidden_layers"]


def rotates_but_every_nth(config: Config) -> list[bool]:
    """Returns for each layer whether it has rotary embeddings (SmolLM3).

    Every `no_rope_layer_interval`-th layer has none. If the config has a list `no_rope_layers`, the list decides:
    its entry for a layer without rotary embeddings is 0.
    """
    count, listed = config["num_hidden_layers"], config["no_rope_layers"]
    layers = listed or [(i + 1) % nth_of(config, "no_rope_layer_interval") for i in range(count)]
    return [bool(rotates) for rotates in layers]


def window_in_every_other(config: Config) -> list[str]:
    """The first layer, the third, and so on have a sliding window (gpt-oss, Gemma 2)."""
    return [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]


def window_but_every_nth_from_first(config: Config) -> list[str]:
    """The first of every `sliding_window_pattern` layers attends to all positions, the others have a window (CWM)."""
    nth = nth_of(config, "sliding_window_pattern")
    return [SLIDING if i % nth else FULL for i in range(config["num_hidden_layers"])]


def window_but_every_nth_after_dense(config: Config) -> list[str]:
    """Every n-th layer attends to all positions; the others have a window (Cohere 2 with experts).

    n is `prefix_dense_sliding_window_pattern` among the first `first_k_dense_replace` layers, and
    `sliding_window_pattern` among the others, which are counted by themselves.
    """
    first = config["first_k_dense_replace"] or 0
    counts = {
        "prefix_dense_sliding_window_pattern": first,
        "sliding_window_pattern": config["num_hidden_layers"] - first,
    }
    return [SLIDING if (i + 1) % nth_of(config, name) else FULL for name, count in counts.items() for i in range(count)]


def window_everywhere_if_used(config: Config) -> list[str]:
    """If `use_sliding_window` is set, all layers have a sliding window (Qwen3-MoE)."""
    return window_everywhere(config) if config["use_sliding_window"] else every_layer_full(config)


def window_in_every_other_first(config: Config) -> list[str]:
    """If `use_sliding_window` is set, every other of the first `max_window_layers` layers has a window (Qwen2-MoE)."""
    first = config["max_window_layers"] if config["use_sliding_window"] else 0
    return [kind if i < first else FULL for i, kind in enumerate(window_in_every_other(config))]


def as_attention_bias(config: Config) -> tuple[bool, bool]:
    return config["attention_bias"], config["attention_bias"]


def as_attention_bias_without_output(config: Config) -> tuple[bool, bool]:
    return config["attention_bias"], False


def as_two_settings(config: Config) -> tuple[bool, bool]:
    return config["attention_bias"], config["attention_out_bias"]


def as_use_bias(config: Config) -> tuple[bool, bool]:
    return config["use_bias"], config["use_bias"]


def always_biased(config: Config) -> tuple[bool, bool]:
    return True, False


def as_use_qkv_bias(config: Config) -> tuple[bool, bool]:
    return config["use_qkv_bias"], False


def as_qkv_bias(config: Config) -> tuple[bool, bool]:
    return config["qkv_bias"], False


def rotates_where_windowed(config: Config) -> list[bool]:
    """Only layers with a sliding window have rotary embeddings. Without windows, all layers have them (EXAONE 4)."""
    types = config["layer_types"] or window_but_every_nth(config)
    return [not config["sliding_window"] or kind == SLIDING for kind in types]


def rotates_where_windowed_or_dense(config: Config) -> list[bool]:
    """Layers with a sliding window have rotary embeddings (Cohere 2 with experts).

    Layers without experts have them, too, if `prefix_dense_sliding_window_pattern` is 1.
    """
    types = config["layer_types"] or window_but_every_nth_after_dense(config)
    always = config["prefix_dense_sliding_window_pattern"] == 1
    both = zip(types, sparse_as_listed(config), strict=False)
    return [kind == SLIDING or (always and not sparse) for kind, sparse in both]


def rotates_where_windowed_by_type(config: Config) -> list[bool]:
    """Only layers with a sliding window have rotary embeddings (AFMoE)."""
    return [kind == SLIDING for kind in config["layer_types"] or window_but_every_nth(config)]


def never_rotates(config: Config) -> list[bool]:
    """No layer has rotary embeddings (Nemotron-H)."""
    return [False] * config["num_hidden_layers"]


def every_layer_sparse(config: Config) -> list[bool]:
    return [True] * config["num_hidden_layers"]


def never(config: Config) -> bool:
    return False


def always(config: Config) -> bool:
    return True


def sparse_after_first(config: Config) -> list[bool]:
    """The first `first_k_dense_replace` layers have an MLP, the others experts (GLM-4.5)."""
    return [i >= (config["first_k_dense_replace"] or 0) for i in range(config["num_hidden_layers"])]


def sparse_after_dense_layers(config: Config) -> list[bool]:
    """The first `num_dense_layers` layers have an MLP, the others experts (LFM2)."""
    return [i >= config["num_dense_layers"] for i in range(config["num_hidden_layers"])]


def sparse_as_listed(config: Config) -> list[bool]:
    """The layers that `mlp_layer_types` calls "sparse" have experts; without it, as sparse_after_first (GLM-4.7-Flash).

    Raises UnsupportedModel for a type of feed-forward that is not known.
    """
    types = config["mlp_layer_types"]
    if types is None:
        return sparse_after_first(config)
    if unknown := set(types) - {"dense", "sparse"}:
        raise UnsupportedModel(f"mlp_layer_types {min(unknown)!r} is not supported; supported are dense, sparse")
    if len(types) < config["num_hidden_layers"]:
        raise UnsupportedModel(f"mlp_layer_types with {len(types)} entries is not supported: there are more layers")
    return [kind == "sparse" for kind in types]


def sparse_in_range(config: Config) -> list[bool]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts (ERNIE).

    The end -1 stands for the last layer.
    """
    count, first, last = (config[name] for name in ("num_hidden_layers", *RANGE))
    nth, last = nth_of(config, "moe_layer_interval"), count - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % nth == 0 for i in range(count)]


RANGE = ("moe_layer_start_index", "moe_layer_end_index")


def as_use_expert_bias(config: Config) -> bool:
    return bool(config["use_expert_bias"])


def sparse_if_enabled(config: Config) -> list[bool]:
    return [config["enable_moe_block"]] * config["num_hidden_layers"]


def sparse_if_there_are_experts(config: Config) -> list[bool]:
    return [bool(config["num_local_experts"])] * config["num_hidden_layers"]


def rotates_if_stated(config: Config) -> list[bool]:
    """All layers have rotary embeddings if `position_embedding_type` is "rope", otherwise none (Granite 4)."""
    return [config["position_embedding_type"] == "rope"] * config["num_hidden_layers"]


def sparse_by_step(config: Config) -> list[bool]:
    """Returns for each layer whether it has experts (Qwen).

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`.
    """
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    return [i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def nothing(config: Config) -> Config:
    return {}


def granite_hybrid_settings(config: Config) -> Config:
    """Translates the names of layer types, and computes sizes that the config may leave open (Granite 4).

    In a model without experts, the MLP's size is the setting `shared_intermediate_size`.
    """
    names = {"mamba": LINEAR, "attention": FULL}
    types = config["layer_types"] or [LINEAR] * config["num_hidden_layers"]
    inner = config["intermediate_size" if config["num_local_experts"] else "shared_intermediate_size"]
    size, heads = config["mamba_d_head"], config["mamba_n_heads"]
    return {
        "layer_types": [names.get(kind, kind) for kind in types],
        "intermediate_size": inner,
        "mamba_d_head": config["mamba_expand"] * config["hidden_size"] // heads if size == "auto" else size,
    }


def lfm2_sizes(config: Config) -> Config:
    """Computes the width of the MLP, and reads two settings that older configs name differently (LFM2).

    With `block_auto_adjust_ff_dim`, the width is two thirds of the stated one, multiplied by
    `block_ffn_dim_multiplier` and rounded up to a multiple of `block_multiple_of`.
    """
    inner = config.get("block_ff_dim", config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = config["block_multiple_of"]
            inner = -(-int(config["block_ffn_dim_multiplier"] * inner) // multiple) * multiple
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    return {"intermediate_size": inner, "tie_word_embeddings": tied}


def shared_expert_size(config: Config) -> Config:
    """All shared experts together are one MLP, which is as wide as all of them together (GLM-4.5)."""
    count = config["n_shared_experts"] or 0
    return {"shared_expert_intermediate_size": count * (config["moe_intermediate_size"] or 0)}


def cohere2_moe_settings(config: Config) -> Config:
    """All shared experts together are one MLP. Each is as wide as `intermediate_size`, and so are the experts.

    MLPs of layers without experts are `prefix_dense_intermediate_size` wide (Cohere 2 with experts). The layers before
    `first_k_dense_replace` have a pattern of windows of their own. The norms are layer norms if no `rms_norm_eps` is
    stated.
    """
    inner, dense = config["intermediate_size"], config["prefix_dense_intermediate_size"]
    rms, scores, ways = (config[name] for name in ("rms_norm_eps", *OF_COHERE))
    for name, value, known in zip(OF_COHERE, (scores, ways), (("softmax", "sigmoid"), ("average", "sum")), strict=True):
        if value not in known:
            raise UnsupportedModel(f"{name} {value!r} is not supported; supported are {', '.join(known)}")
    return {
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": (config["num_shared_experts"] or 0) * inner,
        "intermediate_size": inner if dense is None else dense,
        "rms_norm_eps": config["layer_norm_eps"] if rms is None else rms,
        "norm_topk_prob": scores == "softmax" or config["norm_topk_prob"],
        "layer_norm": rms is None,
    }


OF_COHERE = ("expert_selection_fn", "shared_expert_combination_strategy")


def cohere2_moe_spec(spec: ModelSpec, config: Config) -> ModelSpec:
    """The mean of the shared expert's output and of the sum of the others is the half of both."""
    scores, way = (config[name] for name in OF_COHERE)
    of = spec.experts
    if of is not None:
        halved = bool(of.shared_size) and way == "average"
        factor = of.factor * (0.5 if halved else 1.0)
        of = replace(of, sigmoid=scores == "sigmoid", averaged=halved, factor=factor)
    return replace(spec, layer_norm=config["layer_norm"], experts=of)


def afmoe_spec(spec: ModelSpec, config: Config) -> ModelSpec:
    return replace(spec, embed_scale=spec.hidden_size**0.5 if config["mup_enabled"] else 1.0)


def clova_spec(spec: ModelSpec, config: Config) -> ModelSpec:
    """Logits are multiplied by the setting by which Granite divides them (HyperCLOVA X)."""
    return replace(spec, post_norms=config["use_post_norm"], logit_scale=config["logits_scaling"])


def stablelm_spec(spec: ModelSpec, config: Config) -> ModelSpec:
    if config["qk_layernorm"]:
        raise UnsupportedModel("qk_layernorm True is not supported in this family; supported is False")
    return replace(spec, parallel=config["use_parallel_residual"])


def unchanged(spec: ModelSpec, config: Config) -> ModelSpec:
    return spec


def one_number(name: str, config: Config) -> int:
    """Returns the setting `name`, which may be a list with the same number for every layer. Raises UnsupportedModel."""
    value = config[name]
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed or value is None:
        raise UnsupportedModel(f"{name} {value!r} is not supported; supported are numbers from 1 on")
    if len(set(listed)) != 1:
        raise UnsupportedModel(f"{name} is not supported: its entries for the layers differ")
    return int(listed[0])


def hunyuan_moe_settings(config: Config) -> Config:
    """Reads settings that are one number or a list with an entry for each layer (Hunyuan-A13B).

    Each layer has one shared expert. It and the experts are as wide as `intermediate_size`.
    """
    return {name: one_number(name, config) for name in ("num_experts", "moe_topk")}


def ernie_moe_settings(config: Config) -> Config:
    """All shared experts together are one MLP. Raises UnsupportedModel for settings that no published model has."""
    if config["use_bias"]:
        raise UnsupportedModel("use_bias True is not supported with experts; supported is False")
    if (config["moe_norm_min"] or 0) > TINY_SUM:
        raise UnsupportedModel(f"moe_norm_min {config['moe_norm_min']} is not supported: it is more than {TINY_SUM}")
    count = config["moe_num_shared_experts"] or 0
    return {"shared_expert_intermediate_size": count * (config["moe_intermediate_size"] or 0)}


TINY_SUM = 1e-6  # the greatest lower limit of the sum of chosen weights that is left out, as it is never reached


def as_either_name(config: Config) -> Config:
    """Reads biases that configs of InternLM 3 name `qkv_bias` and `bias`."""
    names = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
    return {name: config[other] for name, other in names.items() if config[other] is not None}


def tanh_gelu(config: Config) -> Config:
    """The first configs of Gemma say "gelu", and mean its approximation by tanh."""
    act = config.get("hidden_activation") or config["hidden_act"]
    return {"hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}


def scaled_by_heads(config: Config) -> Config:
    """A multiplier of attention that is null stands for 1 / sqrt(head size) (HyperCLOVA X)."""
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    stated = config["attention_multiplier"]
    return {"attention_multiplier": head_dim**-0.5 if stated is None else stated}


def deepseek_v2_settings(config: Config) -> Config:
    """Does what shared_expert_size does; and neighbouring dimensions rotate together, whatever the config states.

    Raises UnsupportedModel if the weights of experts are to be divided by their sum: codes of this model disagree on
    what `routed_scaling_factor` then means.
    """
    if config["norm_topk_prob"]:
        raise UnsupportedModel("norm_topk_prob True is not supported in this family; supported is False")
    return {**shared_expert_size(config), "rope_interleave": True}


def minicpm3_settings(config: Config) -> Config:
    """Translates factors of embeddings, residual sums and logits (MiniCPM3). null: the factor is 1."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    return {
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": 1.0 if config["scale_depth"] is None else config["scale_depth"] / layers**0.5,
        "logits_scaling": hidden / (config["dim_model_base"] or hidden),
    }


def rotated_part(config: Config) -> Config:
    """Computes the rotated fraction of a head; configs state the number of rotated dimensions instead (MiniMax-M2)."""
    rotated, head_dim = config["rotary_dim"], config["head_dim"]
    return {"partial_rotary_factor": rotated / head_dim} if rotated and head_dim else {}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrent layers of a family. layer_type: their type in configs; mixer: their kind of mixer"""

    layer_type: str
    mixer: str


@dataclass(frozen=True, slots=True)
class FamilyExperts:
    """The properties of a family's experts that its configs do not state, and the names of settings that the configs
    state.

    size: the name of the setting for the experts' intermediate size
    normalized: if true, the weights of a row's experts add up to 1; None: the setting `norm_topk_prob` decides
    sparse: returns for each layer whether it has experts
    sigmoid: if true, the router's scores are sigmoids
    factor: the name of the setting by which the experts' weights are multiplied; "" if there is none
    choice_bias: returns whether experts are chosen by their scores plus a bias for each expert
    shared_size: the name of the setting for the shared expert's intermediate size; "" if there is no shared expert
    shared_gated: if true, the shared expert has a gate
    group_best: if the router may choose groups of experts first, how many of a group's scores are added up; else 0
    methods: the supported values of the setting `topk_method`. Groups are ignored by the method "greedy".
    beside_mlp: if true, layers with experts also have the MLP
    transposed: as in ExpertsSpec
    """

    size: str
    normalized: bool | None
    sparse: Callable[[Config], list[bool]] = every_layer_sparse
    sigmoid: bool = False
    factor: str = ""
    choice_bias: Callable[[Config], bool] = never
    biases: bool = False  # if true, the router and the experts have biases
    shared_size: str = ""
    shared_gated: bool = True
    group_best: int = 0
    methods: tuple[str | None, ...] = ("noaux_tc", None)
    beside_mlp: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The defaults of a model_type, and the properties that its configs do not state. Other fields: see ModelSpec."""

    defaults: Config
    layer_types: Callable[[Config], list[str]] = every_layer_full
    # returns further fields of each LayerSpec
    layer_details: Callable[[Config, Sequence[str]], list[dict[str, Any]]] = every_layer_alike
    rotates: Callable[[Config], list[bool]] = every_layer_rotates
    partial_rotary: bool = False  # if true, a config may rotate only a part of each head
    # if true, a rotated pair is two adjacent dimensions, not dimensions half a head apart
    rotates_neighbours: bool = False
    norm_offset: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: bool = False
    qk_norm_last: bool = False
    whole_qk_norm: bool = False
    parallel: bool = False
    gated: bool = True
    value_norm: bool = False
    layer_scales: bool = False
    per_layer_inputs: bool = False  # if true, configs may state per-layer embeddings
    # returns whether queries, keys and values have biases, and whether the output projection has a bias
    biases: Callable[[Config], tuple[bool, bool]] = as_attention_bias
    mlp_bias: str = "mlp_bias"  # the setting that says whether the feed-forward has biases
    scale_embeddings: bool = False
    # if true, configs state factors for embeddings, attention, residual sums and logits (Granite)
    multipliers: bool = False
    local_rope: bool = False  # if true, layers with a sliding window have rotary settings of their own
    scaling: Config = field(default_factory=dict)  # the rotary scaling if a config states none
    sinks: bool = False
    latent: bool = False  # if true, layers have latent attention; which pairs rotate, `rope_interleave` says
    recurrence: Recurrence | None = None
    attention_gate: bool = False
    separate_gate: bool = False
    activation: Activation | None = None  # the activation, if its name in configs does not tell the whole formula
    experts: FamilyExperts | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # common name of a setting → its name in this family
    derived: Callable[[Config], Config] = nothing  # returns settings that are computed from other settings
    # returns the spec, changed where properties of this family depend on settings
    adapted: Callable[[ModelSpec, Config], ModelSpec] = unchanged

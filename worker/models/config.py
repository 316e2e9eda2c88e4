"""Makes a ModelSpec from a Hugging Face config and the row of its model family (families.py).

The module reads both spellings of rotary settings (`rope_parameters`, and the older `rope_theta` + `rope_scaling` +
`rope_local_base_freq`), of windows (`layer_types`, and the older patterns) and of the number of experts
(`num_local_experts` and `num_experts`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.checkpoint import ENCODERS, GENERATE, Task
from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config_values import (
    NO_ROPE,
    VALUES,
    check_outline,
    check_values,
    checked_rope,
    counted,
    per_layer_inputs,
    rope_spec,
    shown,
)
from worker.models.families import COMMON, FAMILIES
from worker.models.family import FULL, SLIDING, Config, Family
from worker.models.layer_kinds import feed_forward, mixer
from worker.ops.activation.reference import CLAMP, GATED, PLAIN, SWIGLU_ALPHA
from worker.ops.native import MAX_CHOSEN
from worker.quantization.methods import method_of
from worker.spec import Activation, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec, QueryScaling, RopeSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2",
    "xielu": "xielu", "gelu": "gelu",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
SERVED: Mapping[str, tuple[Any, ...]] = {  # for settings that are only partly supported: the supported values
    "use_bidirectional_attention": (None, False, "vision"),  # "vision": only the tokens of an image see later tokens
    "is_causal": (None, True), "conv_bias": (False, None), "clip_qkv": (None,),
    "attn_output_gate": (True, None), "output_gate_type": ("swish", None),
    "swiglu_limit": (CLAMP, None), "swiglu_alpha": (SWIGLU_ALPHA, None),
}  # fmt: skip
COUNTS = ("decoder_sparse_step", "full_attention_interval")
# a multimodal model_type → the family of its text model where `text_config` does not name the family
TEXT_MODELS = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen2_5_vl": "qwen2_5_vl_text", "idefics3": "llama", "smolvlm": "llama",
    "llava": "llama", "lfm2_vl": "lfm2",
}  # fmt: skip
# For these types, the outer config's tie_word_embeddings applies, not the text_config's. The value of the entry is the
# default of that setting.
TIED_OUTSIDE = {"idefics3": False, "smolvlm": False, "lfm2_vl": True}
LATENT = "latent"  # the kind of mixer
GENERATORS = ("forcausallm", "forconditionalgeneration")  # endings of the class names of models that generate text


def spec_from_config(config: Config, task: Task = GENERATE) -> ModelSpec:
    """Returns the spec of a model.

    config: the model's config.json as a dict, in any spelling since transformers 4.40
    task: what the model is served for. A model that only embeds text needs no head, so its head counts as tied to the
        embedding. A model that scores text may have a classification head.

    Raises UnsupportedModel for an unsupported family, rotary kind or activation, and for a config that lacks a size,
    states an impossible value (config_values.py), or has sizes that are too large for the kernels.
    Raises CheckpointError for an unsupported quantization.
    """
    check_outline(config)
    model_type, inner = config.get("model_type"), config.get("text_config") or {}
    check_outline(inner)
    name = str(inner.get("model_type") or TEXT_MODELS[model_type] if model_type in TEXT_MODELS else model_type)
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join(sorted([*FAMILIES, *TEXT_MODELS, *ENCODERS]))
        shown = repr(model_type) if str(model_type) == name else f"{model_type!r} around a {name!r}"
        raise UnsupportedModel(f"model_type {shown} is not supported; supported are {supported}")
    if task.name == "generate":
        _check_generates(config.get("architectures") or ())
    stated = {**COMMON, **family.defaults, **config, **inner}
    if model_type in TIED_OUTSIDE:
        tied = config.get("tie_word_embeddings", TIED_OUTSIDE[model_type])
        stated["tie_word_embeddings"] = stated["tie_embedding"] = config.get("tie_embedding", tied)
    return spec_of_family(name, family, stated, task)


def spec_of_family(name: str, family: Family, stated: Config, task: Task) -> ModelSpec:
    """Returns the spec of a model of a family. stated: its settings, with the defaults of those that it leaves out

    Raises the same errors as `spec_from_config`.
    """
    check_values(stated)
    try:
        stated = {**stated, **{common: stated[own] for common, own in family.names.items()}}
        stated = {**stated, **family.derived(stated)}
        spec = _spec(name, family, stated)
    except KeyError as error:
        raise UnsupportedModel(f"the config of this {name} model lacks {error.args[0]!r}") from error
    check_spec(spec, stated["num_hidden_layers"])
    return replace(spec, labels=task.labels, tied=not task.labels and (spec.tied or task.name == "embed"))


def _check_generates(architectures: Sequence[str]) -> None:
    """Raises UnsupportedModel if the model does not generate text.

    The tensors do not show this: a classifier or an embedder may have all tensors of a tied language model.
    """
    if architectures and not any(name.lower().endswith(GENERATORS) for name in architectures):
        raise UnsupportedModel(
            f"{', '.join(architectures)} does not generate text: --task generate serves only language models"
        )


def _spec(name: str, family: Family, config: Config) -> ModelSpec:
    _check_settings(config)
    if config["rms_norm_eps"] is None:
        own = family.names.get("rms_norm_eps", "rms_norm_eps")
        raise UnsupportedModel(f"{own} null is not supported; supported is {VALUES[own].expected}")
    latent = _latent(config) if family.latent else None
    heads, kv_heads = (config["num_attention_heads"], 1) if latent else _heads(config)
    head_dim = latent.row if latent else _head_dim(config)
    layers, ropes = _layers(family, config)
    method = method_of(config)
    qkv_bias, o_bias = family.biases(config)
    factors = Factors.of(family, config, head_dim)
    spec = ModelSpec(
        model_type=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_positions=_max_positions(config, ropes),
        norm_eps=config["rms_norm_eps"],
        norm_offset=family.norm_offset,
        layer_norm=family.layer_norm,
        norm_bias=family.norm_bias,
        parallel=family.parallel,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        qk_norm=family.qk_norm and config.get("use_qk_norm", True),
        qk_norm_last=family.qk_norm_last,
        whole_qk_norm=family.whole_qk_norm,
        value_norm=family.value_norm,
        layer_scales=family.layer_scales,
        per_layer_inputs=per_layer_inputs(config) if family.per_layer_inputs else None,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=config[family.mlp_bias],
        sinks=family.sinks,
        attention_gate=family.attention_gate,
        separate_gate=family.separate_gate,
        latent=latent,
        experts=_experts(family, config) if any(layer.sparse for layer in layers) else None,
        activation=_activation(family, config["hidden_act"]),
        gated=family.gated,
        attention_scale=factors.attention,
        embed_scale=factors.embed,
        residual_scale=factors.residual,
        query_scaling=_query_scaling(family, config),
        logit_scale=factors.logit,
        attention_softcap=config.get("attn_logit_softcapping") or 0.0,
        logit_softcap=config.get("final_logit_softcapping") or 0.0,
        tied=config["tie_word_embeddings"],
        draft_layers=config.get("num_nextn_predict_layers") or 0,
        eos_ids=_ids(config["eos_token_id"]),
        dtype=_dtype(config.get("dtype") or config.get("torch_dtype") or "float32"),
        stored=None if method is None else method.stored,
    )
    return family.adapted(spec, config)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of a ModelSpec: attention_scale, embed_scale, residual_scale and logit_scale."""

    attention: float
    embed: float = 1.0
    residual: float = 1.0
    logit: float = 1.0

    @classmethod
    def of(cls, family: Family, config: Config, head_dim: int) -> "Factors":
        if family.multipliers:
            if not config["logits_scaling"]:
                raise UnsupportedModel("logits_scaling 0 is not supported: logits are divided by it")
            embed = config["embedding_multiplier"]
            return cls(
                _attention_scale(family, config, head_dim),
                embed,
                config["residual_multiplier"],
                1 / config["logits_scaling"],
            )
        attention = _attention_scale(family, config, head_dim)
        if not config["logit_scale"]:
            raise UnsupportedModel(f"logit_scale {config['logit_scale']!r} is not supported: it multiplies logits")
        embed = config["hidden_size"] ** 0.5 if family.scale_embeddings else 1.0
        return cls(attention, embed, logit=config["logit_scale"])


def _attention_scale(family: Family, config: Config, head_dim: int) -> float:
    if family.latent:
        return float(_latent(config).query ** -0.5) * _yarn_growth(_rope_settings(family, config, FULL)) ** 2
    if family.multipliers:
        if config["attention_multiplier"] is None:
            raise UnsupportedModel("attention_multiplier null is not supported: it multiplies the scores of attention")
        return float(config["attention_multiplier"])
    return float((config.get("query_pre_attn_scalar") or head_dim) ** -0.5)


def _yarn_growth(settings: Config) -> float:
    """Returns the factor by which queries and keys grow with a longer context: 1 unless `mscale_all_dim` is stated."""
    settings, kind = checked_rope(settings), settings.get("rope_type", settings.get("type"))
    weight, factor = settings.get("mscale_all_dim") or 0.0, settings.get("factor") or 1.0
    return 1.0 if kind in (None, "default") or factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0


def _latent(config: Config) -> LatentSpec:
    value = config["v_head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if not value:
        raise UnsupportedModel(f"v_head_dim {config['v_head_dim']!r} is not supported; supported are numbers from 1 on")
    return LatentSpec(
        rank=config["kv_lora_rank"],
        rope=config["qk_rope_head_dim"],
        plain=config["qk_nope_head_dim"],
        value=value,
        query_rank=config["q_lora_rank"] or 0,
    )


def _query_scaling(family: Family, config: Config) -> QueryScaling | None:
    settings = _rope_settings(family, config, FULL)
    beta = settings.get("llama_4_scaling_beta")
    return QueryScaling(beta, settings["original_max_position_embeddings"]) if beta else None


def _heads(config: Config) -> tuple[int, int]:
    """Returns how many query heads and how many K/V heads the layers have. Raises UnsupportedModel."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"] or config["num_attention_heads"]
    if heads % kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads {kv_heads} is not supported: num_attention_heads {heads} is not a multiple of it"
        )
    return heads, kv_heads


def _head_dim(config: Config) -> int:
    if not config["head_dim"] and config["hidden_size"] % config["num_attention_heads"]:
        raise UnsupportedModel(
            f"num_attention_heads {config['num_attention_heads']} is not supported: hidden_size "
            f"{config['hidden_size']} is not a multiple of it, and there is no head_dim"
        )
    size = int(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])
    if size < 1:
        raise UnsupportedModel(
            f"hidden_size {config['hidden_size']} is not supported: it is less than num_attention_heads "
            f"{config['num_attention_heads']}"
        )
    return size


def _check_settings(config: Config) -> None:
    for name, served in SERVED.items():
        if config.get(name) not in served:
            raise UnsupportedModel(f"{name} {shown(config[name])} is not supported; supported is {served[0]!r}")
    for name in COUNTS:
        if name in config:
            counted(config, name)


def _experts(family: Family, config: Config) -> ExpertsSpec | None:
    assert family.experts is not None
    chosen = family.names.get("num_experts_per_tok", "num_experts_per_tok")
    return feed_forward("experts").sizes(family.experts, chosen, config)


def _activation(family: Family, name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if family.activation and ACTIVATIONS[name] != "silu":  # which stands for the family's own
        raise UnsupportedModel(f"activation {name!r} is not supported in this family; supported is 'silu'")
    if (family.activation or ACTIVATIONS[name]) not in (GATED if family.gated else PLAIN):
        raise UnsupportedModel(f"activation {name!r} is not supported in feed-forward networks with a gate")
    return family.activation or ACTIVATIONS[name]


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _layers(family: Family, config: Config) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """Returns the layers and the rotary tables. Layers with the same rotary settings share a table."""
    types = config.get("layer_types") or family.layer_types(config)
    recurrent = family.recurrence and family.recurrence.layer_type
    known = (FULL, recurrent or SLIDING)
    if unknown := set(types) - {*known}:
        raise UnsupportedModel(f"layer type {min(unknown)!r} is not supported; supported are {', '.join(known)}")
    if FULL not in types and recurrent:
        raise UnsupportedModel(f"a model without a layer of type {FULL} is not supported")
    count = config["num_hidden_layers"]
    states = _states(family, config) if recurrent in types[:count] else {}
    sparse = [False] * count if family.experts is None else family.experts.sparse(config)
    details = family.layer_details(config, types[:count])
    ropes: dict[RopeSpec, int] = {}
    layers = []
    for kind, rotates, has_experts, more in zip(types[:count], family.rotates(config), sparse, details, strict=False):
        settings = _rope(family, config, kind, more.get("head_dim", 0)) if rotates else NO_ROPE
        rope = ropes.setdefault(settings, len(ropes))
        window = config["sliding_window"] or 0 if kind == SLIDING else 0
        attention = {"mixer": LATENT} if family.latent else {}
        own = states.get(kind, attention)
        layers.append(LayerSpec(window=window, rope=rope, sparse=has_experts, **own, **more))
    return tuple(layers), tuple(ropes)


def _states(family: Family, config: Config) -> dict[str, dict[str, Any]]:
    """Returns the LayerSpec fields that only recurrent layers have, by type of layer."""
    row = family.recurrence
    return {} if row is None else {row.layer_type: {"mixer": row.mixer, "state": mixer(row.mixer).state(config)}}


def _max_positions(config: Config, ropes: Sequence[RopeSpec]) -> int:
    """Returns how many positions the model was trained for, corrected by its rotary scaling.

    longrope uses other factors for texts that are longer than the original positions, but how long a text becomes is
    not known before it ends. Models with longrope are therefore served only up to the original positions.
    """
    positions = int(config["max_position_embeddings"])
    for rope in ropes:
        match rope.kind:
            case "longrope":
                positions = min(positions, rope.original_positions)
            case "yarn":
                positions = max(positions, int(rope.original_positions * rope.factor))
    return positions


def _rope(family: Family, config: Config, kind: str, head_dim: int) -> RopeSpec:
    """head_dim: the size of the layer's heads if it differs from the model's, else 0"""
    settings = _rope_settings(family, config, kind)
    if family.latent:
        return _latent_rope(_latent(config), settings, config)
    spec = rope_spec(settings, config, head_dim or _head_dim(config), partial=family.partial_rotary)
    return replace(spec, neighbours=family.rotates_neighbours, head_dim=head_dim)


def _latent_rope(of: LatentSpec, settings: Config, config: Config) -> RopeSpec:
    """Returns the rotary embedding of a cached row, of which the last `of.rope` numbers are rotated."""
    part = settings.get("partial_rotary_factor")
    if part not in (None, 1, of.rope / of.query):
        raise UnsupportedModel(
            f"partial_rotary_factor {shown(part)} is not supported: qk_rope_head_dim says what is rotated"
        )
    spec = rope_spec({**settings, "partial_rotary_factor": None}, config, of.rope, partial=False)
    return replace(spec, rotated=of.rope, neighbours=bool(config["rope_interleave"]))


def _rope_settings(family: Family, config: Config, kind: str) -> Config:
    """Returns the rotary settings of one kind of layer as one flat dict, from the old or the new spelling."""
    local = family.local_rope and kind == SLIDING
    theta = config["rope_local_base_freq"] if local else config["rope_theta"]
    old = {"rope_theta": theta, "partial_rotary_factor": config.get("partial_rotary_factor")}
    new = config.get("rope_parameters") or family.defaults.get("rope_parameters") or {}
    if kind in new or FULL in new or SLIDING in new:
        of_kind = new.get(kind) or {}
        if not isinstance(of_kind, dict):
            raise UnsupportedModel(f"rope_parameters: {kind} {str(of_kind)[:80]!r} is not supported; it is an object")
        return {**old, **of_kind}
    scaling = {} if local else {**(config.get("rope_scaling") or {}), **new}
    return {**old, **(scaling or family.scaling)}


# Refuses a model whose sizes contradict each other or are too large for the kernels, before any weight is read.

MAX_THETA = 1e18  # the powers of theta must be finite in float32


def check_spec(spec: ModelSpec, layers: int) -> None:
    """Raises UnsupportedModel if a size is not supported. layers: num_hidden_layers in the config"""
    if len(spec.layers) != layers:
        raise UnsupportedModel(
            f"num_hidden_layers {layers} is not supported: the lists of layers, such as layer_types, end after "
            f"{len(spec.layers)}"
        )
    for layer in dict.fromkeys(spec.layers):
        mixer(layer.mixer).check(spec, layer)
        has_mlp = not layer.sparse and not layer.bare
        if not spec.intermediate_size and (has_mlp or (spec.experts and spec.experts.beside_mlp)):
            raise UnsupportedModel(f"intermediate_size {spec.intermediate_size} is not supported: layers have MLPs")
    for rope in spec.ropes:
        _check_rope(rope, rope.head_dim or spec.head_dim)
    if spec.experts is not None and spec.experts.chosen > MAX_CHOSEN:
        raise UnsupportedModel(f"num_experts_per_tok {spec.experts.chosen} is not supported: at most {MAX_CHOSEN} are")


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    if rope.kind == "none":
        return
    rotated = rope.rotated or head_dim
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor is not supported: it rotates {rotated} dimensions of head_dim {head_dim}, and "
            "supported are even numbers from 2 on"
        )
    if not 1 < rope.theta <= MAX_THETA:
        raise UnsupportedModel(
            f"rope_theta {rope.theta:g} is not supported: it must be more than 1, at most {MAX_THETA:g}"
        )
    if rope.kind == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise UnsupportedModel(
            f"high_freq_factor {rope.high_freq_factor:g} is not supported: it must be more than low_freq_factor "
            f"{rope.low_freq_factor:g}"
        )
    if rope.kind == "longrope" and len(rope.factors) != rotated // 2:
        raise UnsupportedModel(
            f"short_factor of {len(rope.factors)} numbers is not supported: {rotated // 2} pairs of dimensions rotate"
        )

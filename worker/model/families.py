"""Makes a ModelSpec from a Hugging Face config. Each model family is a row of defaults and switches.

The module reads both spellings of rotary settings (`rope_parameters`, and the older `rope_theta` + `rope_scaling` +
`rope_local_base_freq`), and both spellings of windows (`layer_types`, and the older patterns). The defaults equal those
of the config classes in transformers, because config.json omits values that equal them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.kernels.act_and_mul import Activation
from worker.model.checkpoint import UnsupportedModel
from worker.model.quantization.methods import method_of
from worker.model.rope_settings import NO_ROPE, rope_spec
from worker.model.spec import LayerSpec, ModelSpec, RopeSpec

Config = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
COMMON = {
    "head_dim": None, "num_key_value_heads": None, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10_000.0, "eos_token_id": (), "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def _every_layer_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def _window_everywhere(config: Config) -> list[str]:
    return [SLIDING if config["sliding_window"] else FULL] * config["num_hidden_layers"]


def _window_from_layer(config: Config) -> list[str]:
    """Windows the layers from `max_window_layers` on if `use_sliding_window` is set (Qwen)."""
    first = config["max_window_layers"] if config["use_sliding_window"] else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def _window_but_every_nth(config: Config) -> list[str]:
    """Windows all layers except every `sliding_window_pattern`-th, which attends to all positions (Gemma 3)."""
    nth = config["sliding_window_pattern"]
    return [SLIDING if (i + 1) % nth else FULL for i in range(config["num_hidden_layers"])]


def _window_where_nothing_rotates(config: Config) -> list[str]:
    """Windows the layers without rotary embeddings if `use_sliding_window` is set (SmolLM3).

    Layers with rotary embeddings attend to all positions.
    """
    windowed = config["use_sliding_window"] and config["sliding_window"]
    return [FULL if rotates or not windowed else SLIDING for rotates in _rotates_but_every_nth(config)]


def _every_layer_rotates(config: Config) -> list[bool]:
    return [True] * config["num_hidden_layers"]


def _rotates_but_every_nth(config: Config) -> list[bool]:
    """Returns for each layer whether it has rotary embeddings (SmolLM3).

    Every `no_rope_layer_interval`-th layer has none, unless the list `no_rope_layers` exists, where 0 means none.
    """
    nth = config["no_rope_layer_interval"]
    layers = config["no_rope_layers"] or [(i + 1) % nth for i in range(config["num_hidden_layers"])]
    return [bool(rotates) for rotates in layers]


@dataclass(frozen=True, slots=True)
class Family:
    """The defaults of a model_type, and the properties that its configs do not state."""

    defaults: Config
    layer_types: Callable[[Config], list[str]] = _every_layer_full
    rotates: Callable[[Config], list[bool]] = _every_layer_rotates
    fused: bool = False
    partial_rotary: bool = False  # a config may rotate only a part of each head
    norm_offset: bool = False
    sandwich_norms: bool = False
    qk_norm: bool = False
    always_qkv_bias: bool = False
    scale_embeddings: bool = False
    local_rope: bool = False  # windowed layers have rotary settings of their own
    names: Mapping[str, str] = field(default_factory=dict)  # common name of a setting → the name in this family


PHI3 = {
    "vocab_size": 32_064, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32_000,
}  # fmt: skip
SMOLLM3 = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
    "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
    "eos_token_id": 128_001, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32_768,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "eos_token_id": 1,
    "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family({"vocab_size": 32_000, "max_position_embeddings": 2048, "eos_token_id": 2}),
    "mistral": Family(
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        layer_types=_window_everywhere,
    ),
    "qwen2": Family(QWEN, layer_types=_window_from_layer, always_qkv_bias=True),
    "qwen3": Family({**QWEN, "head_dim": 128}, layer_types=_window_from_layer, qk_norm=True),
    "gemma3_text": Family(
        GEMMA3, layer_types=_window_but_every_nth, norm_offset=True, sandwich_norms=True, qk_norm=True,
        scale_embeddings=True, local_rope=True, names={"hidden_act": "hidden_activation"},
    ),
    "phi3": Family(PHI3, layer_types=_window_everywhere, fused=True, partial_rotary=True),
    "smollm3": Family(SMOLLM3, layer_types=_window_where_nothing_rotates, rotates=_rotates_but_every_nth),
}  # fmt: skip
# multimodal model_type → the family of its text model, if `text_config` names none
TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
GENERATORS = ("forcausallm", "forconditionalgeneration")  # the names of classes that generate text end so


def spec_from_config(config: Config) -> ModelSpec:
    """Returns the spec of a model. config: its config.json as a dict, in any spelling since transformers 4.40.

    Raises UnsupportedModel for an unsupported family, rotary kind or activation, and for a config that lacks a size.
    Raises CheckpointError for an unsupported quantization.
    """
    model_type, inner = config.get("model_type"), config.get("text_config") or {}
    name = str(inner.get("model_type") or TEXT_MODELS[model_type] if model_type in TEXT_MODELS else model_type)
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join(sorted([*FAMILIES, *TEXT_MODELS]))
        shown = repr(model_type) if model_type == name else f"{model_type!r} around a {name!r}"
        raise UnsupportedModel(f"model_type {shown} is not supported; supported are {supported}")
    _check_purpose(config.get("architectures") or ())
    try:
        return _spec(name, family, {**COMMON, **family.defaults, **config, **inner})
    except KeyError as error:
        raise UnsupportedModel(f"the config of this {name} model lacks {error.args[0]!r}") from error


def _check_purpose(architectures: Sequence[str]) -> None:
    """Raises UnsupportedModel if the model does not generate text.

    The tensors do not show this: a classifier or an embedder may have all tensors of a tied language model.
    """
    if architectures and not any(name.lower().endswith(GENERATORS) for name in architectures):
        raise UnsupportedModel(f"{', '.join(architectures)} does not generate text: only language models are served")


def _spec(name: str, family: Family, config: Config) -> ModelSpec:
    heads, head_dim = config["num_attention_heads"], _head_dim(config)
    layers, ropes = _layers(family, config)
    method = method_of(config)
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel("attn_logit_softcapping is not supported")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported: only causal models generate text")
    return ModelSpec(
        model_type=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"] or heads,
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_positions=_max_positions(config, ropes),
        norm_eps=config["rms_norm_eps"],
        norm_offset=family.norm_offset,
        sandwich_norms=family.sandwich_norms,
        qk_norm=family.qk_norm,
        qkv_bias=family.always_qkv_bias or config["attention_bias"],
        o_bias=not family.always_qkv_bias and config["attention_bias"],
        mlp_bias=config["mlp_bias"],
        fused=family.fused,
        attention_scale=config.get("query_pre_attn_scalar", head_dim) ** -0.5,
        activation=_activation(config[family.names.get("hidden_act", "hidden_act")]),
        embed_scale=config["hidden_size"] ** 0.5 if family.scale_embeddings else 1.0,
        logit_softcap=config.get("final_logit_softcapping") or 0.0,
        tied=config["tie_word_embeddings"],
        eos_ids=_ids(config["eos_token_id"]),
        dtype=_dtype(config.get("dtype") or config.get("torch_dtype") or "float32"),
        stored=None if method is None else method.stored,
    )


def _head_dim(config: Config) -> int:
    return int(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


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
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModel(f"layer type {min(unknown)!r} is not supported; supported are {FULL}, {SLIDING}")
    ropes: dict[RopeSpec, int] = {}
    layers = []
    for kind, rotates in zip(types[: config["num_hidden_layers"]], family.rotates(config), strict=False):
        rope = ropes.setdefault(_rope(family, config, kind) if rotates else NO_ROPE, len(ropes))
        layers.append(LayerSpec(window=config["sliding_window"] if kind == SLIDING else 0, rope=rope))
    return tuple(layers), tuple(ropes)


def _max_positions(config: Config, ropes: Sequence[RopeSpec]) -> int:
    """Returns how many positions the model was trained for, corrected by its rotary scaling.

    longrope uses other factors for texts longer than the original positions, but the length of a text is not known
    before it ends. Models with longrope are therefore served only up to the original positions.
    """
    positions = int(config["max_position_embeddings"])
    for rope in ropes:
        match rope.kind:
            case "longrope":
                positions = min(positions, rope.original_positions)
            case "yarn":
                positions = max(positions, int(rope.original_positions * rope.factor))
    return positions


def _rope(family: Family, config: Config, kind: str) -> RopeSpec:
    settings = _rope_settings(family, config, kind)
    return rope_spec(settings, config, _head_dim(config), partial=family.partial_rotary)


def _rope_settings(family: Family, config: Config, kind: str) -> Config:
    """Returns the rotary settings of one kind of layer as one flat dict, from the old or the new spelling."""
    local = family.local_rope and kind == SLIDING
    theta = config["rope_local_base_freq"] if local else config["rope_theta"]
    old = {"rope_theta": theta, "partial_rotary_factor": config.get("partial_rotary_factor")}
    new = config.get("rope_parameters") or {}
    if kind in new or FULL in new or SLIDING in new:
        return {**old, **(new.get(kind) or {})}
    scaling = {} if local else {**(config.get("rope_scaling") or {}), **new}
    return {**old, **scaling}

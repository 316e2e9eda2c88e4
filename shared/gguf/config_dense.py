"""Makes the part of config.json that only dense architectures have."""

from shared.gguf.config_values import (
    LONG_FACTORS,
    SHORT_FACTORS,
    Config,
    Hyperparameters,
    pair_factors,
    rope_scaling,
    unscaled_in_windows,
    windows,
)
from shared.gguf.naming import GgufError

# Numbers of layers of the only Gemma 2 and Gemma 3 models whose attention is not scaled by the size of a head.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
# Values of n: every n-th layer attends to all positions, and the other layers have a window.
GEMMA2_PATTERN, GEMMA3_PATTERN, OLMO3_PATTERN, EXAONE4_PATTERN, COHERE2_PATTERN = 2, 6, 4, 4, 4
GEMMA2_WINDOW = 4096
SMOLLM3_NO_ROPE = 4
MULTIPLIERS = {  # Granite's multipliers: name in GGUF → name in config.json
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}  # fmt: skip


def same_in_all_layers(values: Hyperparameters) -> Config:
    """Returns numbers of heads, feed-forward size and rotary scaling of a model whose layers are all alike."""
    heads = values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", values.integer("embedding_length") // heads)
    for name in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        values.expect(name, head_dim)
    sparse = values.container.metadata.get(f"{values.architecture}.expert_count")  # all layers may have experts
    return {
        "head_dim": head_dim,
        "num_key_value_heads": values.integer("attention.head_count_kv", heads),
        "intermediate_size": values.integer("feed_forward_length", 0 if sparse else None),
        "rope_scaling": rope_scaling(values, head_dim),
    }


def has_bias(values: Hyperparameters, module: str) -> bool:
    """Whether the linear `module` has a bias in any layer. Queries may share a tensor with keys and values."""
    ends = (f".{module}.bias", ".attn_qkv.bias") if module == "attn_q" else f".{module}.bias"
    return any(name.endswith(ends) for name in values.container.tensors)


def whole_heads(values: Hyperparameters, config: Config) -> Config:
    """All dimensions of a head are rotated."""
    values.expect("rope.dimension_count", config["head_dim"])
    return {}


def mrope_sections(values: Hyperparameters, config: Config) -> Config:
    """Returns how many pairs of a head rotate by each of the three positions (M-RoPE). In text, the three are equal."""
    sections = values.entries("rope.dimension_sections", int, [])
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": scaling | {"mrope_section": sections[:3]}} if sections else {}


def qwen_vl(values: Hyperparameters, config: Config) -> Config:
    """Qwen2.5-VL and Qwen3-VL. The tower's own file says from which of its layers vectors go to the text model."""
    values.key("n_deepstack_layers")
    return whole_heads(values, config) | mrope_sections(values, config)


def part_of_heads(values: Hyperparameters, config: Config) -> Config:
    """The first dimensions of a head are rotated."""
    head_dim = config["head_dim"]
    rotated = values.integer("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise GgufError(
            f"{values.container.name}: {values.key('rope.dimension_count')} is {rotated}; supported are even numbers "
            f"up to {head_dim}"
        )
    return {"partial_rotary_factor": rotated / head_dim}


def smollm3(values: Hyperparameters, config: Config) -> Config:
    return whole_heads(values, config) | {"no_rope_layer_interval": SMOLLM3_NO_ROPE}


def gemma2(values: Hyperparameters, config: Config) -> Config:
    return whole_heads(values, config) | {
        **windows(values, config, GEMMA2_PATTERN, GEMMA2_WINDOW),
        "query_pre_attn_scalar": _query_scale(config, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def gemma3(values: Hyperparameters, config: Config) -> Config:
    values.expect("rope.dimension_count_swa", config["head_dim"])
    return whole_heads(values, config) | {
        **windows(values, config, GEMMA3_PATTERN),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _query_scale(config, GEMMA3_27B_LAYERS),
        "final_logit_softcapping": values.number("final_logit_softcapping", 0.0),
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return int(hidden // heads if layers == layers_of_27b else config["head_dim"])


def phi3(values: Hyperparameters, config: Config) -> Config:
    container, head_dim = values.container, config["head_dim"]
    rotated = values.integer("rope.dimension_count", head_dim)
    original = values.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    extra = {
        "sliding_window": values.integer("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": original,
    }
    short, long = container.tensors.get(SHORT_FACTORS), container.tensors.get(LONG_FACTORS)
    magnitude = values.number("rope.scaling.attn_factor", 1.0)
    if short is None or long is None:
        return extra
    if any(factors.type != "F32" or factors.shape != (rotated // 2,) for factors in (short, long)):
        raise GgufError(f"{container.name}: {SHORT_FACTORS} does not fit the rest of the file")
    scaling = pair_factors(container, short.floats(), long.floats(), original)
    return extra | {"rope_scaling": scaling | {"attention_factor": magnitude}}


def mistral3(values: Hyperparameters, config: Config) -> Config:
    """Ministral 3, whose queries grow with their positions; or Mistral Small 3.1, if the file states no YaRN."""
    window, scaling = values.integer("attention.sliding_window", 0), config["rope_scaling"]
    beta, growth = values.number("attention.temperature_scale", 0.0), values.number(LOG_MULTIPLIER, 0.0)
    found = whole_heads(values, config) | {"sliding_window": window or None}
    if scaling is None or scaling["rope_type"] != "yarn":
        values.expect("attention.temperature_scale", 0)
        values.expect(LOG_MULTIPLIER, 0)
        return found
    magnitude = {"mscale": 1.0, "mscale_all_dim": growth} if growth else {}
    names = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    return found | names | {"rope_scaling": scaling | magnitude | {"llama_4_scaling_beta": beta}}


LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def olmo2(values: Hyperparameters, config: Config) -> Config:
    """OLMo 2, or OLMo 3 if layers have windows."""
    found = whole_heads(values, config) | {"attention_bias": has_bias(values, "attn_q")}
    if not values.integer("attention.sliding_window", 0):
        return found
    names = {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    return found | names | windows(values, config, OLMO3_PATTERN) | unscaled_in_windows(values, config)


def glm4(values: Hyperparameters, config: Config) -> Config:
    return part_of_heads(values, config) | {"attention_bias": has_bias(values, "attn_q")}


def granite(values: Hyperparameters, config: Config) -> Config:
    bias = {"attention_bias": has_bias(values, "attn_q"), "mlp_bias": has_bias(values, "ffn_down")}
    values.expect("expert_shared_feed_forward_length", config["intermediate_size"])  # stated only by Granite 4
    return whole_heads(values, config) | bias | factors_of_granite(values, config)


def factors_of_granite(values: Hyperparameters, config: Config) -> Config:
    """Returns Granite's multipliers. All layers are rotated; the file must state this: `finetuned` is True."""
    values.expect("rope.scaling.finetuned", True)
    return granite_factors(values, config)


def granite_factors(values: Hyperparameters, config: Config) -> Config:
    """Returns Granite's multipliers. A multiplier that the file does not state has no effect."""
    attention = values.number("attention.scale", 0.0) or config["head_dim"] ** -0.5
    factors = {name: values.number(stored, 0.0) or 1.0 for stored, name in MULTIPLIERS.items()}
    return factors | {"attention_multiplier": attention}


def ernie4_5(values: Hyperparameters, config: Config) -> Config:
    return whole_heads(values, config) | {"use_bias": has_bias(values, "attn_q")}


def exaone4(values: Hyperparameters, config: Config) -> Config:
    """EXAONE 4. If some layers have a window, the layers without a window are not rotated."""
    values.expect("rope.freq_base_swa", config["rope_theta"])
    return whole_heads(values, config) | windows(values, config, EXAONE4_PATTERN)


def seed_oss(values: Hyperparameters, config: Config) -> Config:
    biases = {"attention_bias": has_bias(values, "attn_q"), "attention_out_bias": has_bias(values, "attn_output")}
    return whole_heads(values, config) | biases


def command_r(values: Hyperparameters, config: Config) -> Config:
    scale = {"logit_scale": values.number("logit_scale", 1.0)}
    return whole_heads(values, config) | scale | {"attention_bias": has_bias(values, "attn_q")}


def cohere2(values: Hyperparameters, config: Config) -> Config:
    """Command R7B. Layers without a window are not rotated."""
    values.expect("rope.freq_base_swa", config["rope_theta"])
    return command_r(values, config) | windows(values, config, COHERE2_PATTERN)


def starcoder2(values: Hyperparameters, config: Config) -> Config:
    window = values.integer("attention.sliding_window", 0) or None
    return whole_heads(values, config) | {"use_bias": has_bias(values, "attn_q"), "sliding_window": window}


def hunyuan(values: Hyperparameters, config: Config) -> Config:
    """Hunyuan. Its converter multiplies the rotary base instead of scaling positions."""
    values.key("rope.scaling.original_context_length")
    return whole_heads(values, config) | {"attention_bias": has_bias(values, "attn_q")}


def apertus(values: Hyperparameters, config: Config) -> Config:
    found = {"attention_bias": has_bias(values, "attn_q"), "hidden_act": "xielu"}
    return whole_heads(values, config) | found | _unscaled_if_not_stated(config)


def nemotron(values: Hyperparameters, config: Config) -> Config:
    bias = {"attention_bias": has_bias(values, "attn_q"), "mlp_bias": has_bias(values, "ffn_down")}
    return part_of_heads(values, config) | bias


def arcee(values: Hyperparameters, config: Config) -> Config:
    bias = {"attention_bias": has_bias(values, "attn_q"), "mlp_bias": has_bias(values, "ffn_down")}
    return whole_heads(values, config) | bias


def _unscaled_if_not_stated(config: Config) -> Config:
    """Turns rotary scaling off if the file states none, because config classes of some families have it by default."""
    return {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}

"""Makes the part of config.json that only Gemma 4 has.

Sizes differ between layers, layers share K/V, and each layer has its own token embeddings; some models have experts.
"""

from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.config.mixtures import experts
from shared.gguf.config.rotary import ROPE_FREQS
from shared.gguf.config.windows import FULL, SLIDING, windows
from shared.gguf.errors import GgufError

PATTERN = 6  # n: every n-th layer attends to all positions, the other layers have a window
NOT_ROTATED = 1e30  # a divisor of frequencies so large that a pair is not rotated


def sizes(values: Hyperparameters) -> Config:
    """Returns the head and feed-forward sizes of the layers with a window."""
    head_dim = values.integer("attention.key_length_swa", values.integer("attention.key_length"))
    values.expect("attention.value_length_swa", head_dim)
    kv_heads, inner = _by_layer(values, "attention.head_count_kv"), _by_layer(values, "feed_forward_length")
    return {"head_dim": head_dim, "num_key_value_heads": kv_heads[0], "intermediate_size": inner[0]}


def extra(values: Hyperparameters, config: Config) -> Config:
    container, size = values.container, values.integer("embedding_length_per_layer_input", 0)
    table = container.tensors.get("per_layer_token_embd.weight")
    found = windows(values, config, PATTERN)
    types, shared = found["layer_types"], values.integer("attention.shared_kv_layers", 0)
    own = [i for i, kind in enumerate(types) if kind == FULL and i < len(types) - shared]
    return found | {
        "per_layer_config": _of_full_layers(values, config, types),
        "rope_parameters": _rotary(values, config),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_wide(values, config, shared),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in container.tensors for i in own),
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": values.number("final_logit_softcapping", 0.0) or None,
        **(_experts(values) if values.integer("expert_count", 0) else {"num_experts": None, "top_k_experts": None}),
    }


def _by_layer(values: Hyperparameters, name: str) -> list[int]:
    """Returns a list with a value for each layer; the file may state one value for all layers."""
    layers, found = values.integer("block_count"), values.container.metadata.get(values.key(name))
    if not isinstance(found, list):
        return [values.integer(name)] * layers
    if len(found) != layers or not all(isinstance(one, int) and one > 0 for one in found):
        raise GgufError(f"{values.container.name}: {values.key(name)} must have a whole number for each layer")
    return found


def _of_full_layers(values: Hyperparameters, config: Config, types: list[str]) -> Config:
    """Returns layer number → number of heads, for the layers that attend to all positions."""
    head_dim, kv_heads = values.integer("attention.key_length"), _by_layer(values, "attention.head_count_kv")
    values.expect("attention.value_length", head_dim)
    if any(heads != config["num_key_value_heads"] for i, heads in enumerate(kv_heads) if types[i] == SLIDING):
        raise GgufError(f"{values.container.name}: layers with a window have different numbers of key heads")
    full = [i for i, kind in enumerate(types) if kind == FULL]
    return {str(i): {"head_dim": head_dim, "num_key_value_heads": kv_heads[i]} for i in full}


def _is_wide(values: Hyperparameters, config: Config, shared: int) -> bool:
    """Whether the MLPs of layers that share K/V are twice as wide as the MLPs of the other layers."""
    inner, one = _by_layer(values, "feed_forward_length"), config["intermediate_size"]
    own = len(inner) - shared
    wide = bool(inner[own:]) and inner[-1] == 2 * one
    if inner != [one] * own + [2 * one if wide else one] * shared:
        raise GgufError(f"{values.container.name}: {values.key('feed_forward_length')} {inner} is not supported")
    return wide


def _rotary(values: Hyperparameters, config: Config) -> Config:
    """Returns rotary settings by kind of layer. In layers without a window, a tensor says which pairs rotate."""
    head_dim, name = values.integer("attention.key_length"), values.container.name
    values.expect("rope.dimension_count", head_dim)
    values.expect("rope.dimension_count_swa", config["head_dim"])
    if values.text("rope.scaling.type", "none") != "none":
        raise GgufError(f"{name}: rotary scaling is not supported in Gemma 4")
    tensor = values.container.tensors.get(ROPE_FREQS)
    if tensor is None or tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise GgufError(f"{name}: {ROPE_FREQS} is missing, or does not fit the rest of the file")
    factors = tensor.floats()
    rotated = sum(factor == 1 for factor in factors)
    if any(factor < 0.9 * NOT_ROTATED for factor in factors[rotated:]) or not all(f == 1 for f in factors[:rotated]):
        raise GgufError(f"{name}: {ROPE_FREQS} has other factors than 1, and {NOT_ROTATED:g} for pairs not rotated")
    local = values.number("rope.freq_base_swa", 10_000.0)
    part = 2 * rotated / head_dim
    return {
        FULL: {"rope_type": "proportional", "rope_theta": config["rope_theta"], "partial_rotary_factor": part},
        SLIDING: {"rope_type": "default", "rope_theta": local},
    }


def _experts(values: Hyperparameters) -> Config:
    found = experts(values, "num_experts", normalized=True)
    return {
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
    }

"""Makes the part of config.json that only models with recurrent layers have (Gated DeltaNet, Mamba-2, convolutions)."""

from functools import partial

from shared.gguf.config.dense import (
    granite_factors,
    has_bias,
    mrope_sections,
    part_of_heads,
    same_in_all_layers,
    whole_heads,
)
from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.config.mixtures import experts, qwen_experts, shared_expert
from shared.gguf.container import Container
from shared.gguf.errors import GgufError

FULL_EVERY_NTH = 4
SIZES = {  # name in GGUF → name in config.json
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
}  # fmt: skip


def qwen3_5(values: Hyperparameters, config: Config) -> Config:
    return _recurrent(values, config) | mrope_sections(values, config)


def qwen3_5_moe(values: Hyperparameters, config: Config) -> Config:
    return qwen3_5(values, config) | qwen_experts(values, normalized=True) | shared_expert(values, config)


def qwen3_next(values: Hyperparameters, config: Config) -> Config:
    return _recurrent(values, config) | qwen_experts(values, normalized=True) | shared_expert(values, config)


def _recurrent(values: Hyperparameters, config: Config) -> Config:
    sizes = {name: values.integer(stored) for stored, name in SIZES.items()}
    values_size, heads = values.integer("ssm.inner_size"), sizes["linear_num_value_heads"]
    if heads < 1 or values_size % heads:
        name = values.key("ssm.inner_size")
        raise GgufError(f"{values.container.name}: {name} {values_size} cannot be divided by {heads} heads")
    return part_of_heads(values, config) | sizes | {
        "linear_value_head_dim": values_size // heads,
        "layer_types": _layer_types(values, config["num_hidden_layers"]),
        "attention_bias": has_bias(values, "attn_q"),
    }  # fmt: skip


def _layer_types(values: Hyperparameters, layers: int) -> list[str]:
    nth = values.integer("full_attention_interval", FULL_EVERY_NTH)
    if nth < 1:
        raise GgufError(
            f"{values.container.name}: {values.key('full_attention_interval')} is {nth}, not a number from 1 on"
        )
    every = [bool((i + 1) % nth) for i in range(values.integer("block_count"))]
    recurrent = values.container.entries(values.key("attention.recurrent_layers"), bool | int, every)
    if len(recurrent) < layers:
        raise GgufError(
            f"{values.container.name}: {len(recurrent)} of its {layers} layers say whether they are recurrent"
        )
    return ["linear_attention" if one else "full_attention" for one in recurrent[:layers]]


def sizes_by_layer(values: Hyperparameters, recurrent: str) -> Config:
    """Finds recurrent layers in files that state key heads layer by layer: a recurrent layer has no key heads.

    recurrent: the type of recurrent layers in config.json.
    """
    container, key = values.container, values.key("attention.head_count_kv")
    heads = container.entries(key, int)
    attending = {count for count in heads if count}
    if len(heads) != values.integer("block_count") or len(attending) != 1:
        raise GgufError(f"{container.name}: {key} {heads} must be 0 or the same number for every layer")
    stated = {**container.metadata, key: attending.pop()}
    same = Hyperparameters(Container(container.name, stated, container.tensors), values.architecture, values.seen)
    kinds = ["full_attention" if count else recurrent for count in heads]
    return same_in_all_layers(same) | {"layer_types": kinds}


sizes_of_lfm2 = partial(sizes_by_layer, recurrent="conv")
sizes_of_granite = partial(sizes_by_layer, recurrent="linear_attention")


def granite_hybrid(values: Hyperparameters, config: Config) -> Config:
    """Granite 4. The value `finetuned` in its file says whether queries and keys are rotated."""
    values.seen.add("rope.scaling.finetuned")
    rotated = values.container.flag(values.key("rope.scaling.finetuned"), True)
    inner, heads = values.integer("ssm.inner_size"), values.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads or inner % config["hidden_size"]:
        raise GgufError(f"{values.container.name}: {values.key('ssm.inner_size')} {inner} does not fit the rest of it")
    size = config["intermediate_size"]
    chosen = {"num_local_experts": 0, "num_experts_per_tok": 0}
    if values.integer("expert_count", 0):
        chosen = experts(values, "num_local_experts", normalized=True)
        size = values.integer("expert_shared_feed_forward_length")
    values.expect("expert_shared_feed_forward_length", size)
    return whole_heads(values, config) | granite_factors(values, config) | chosen | {
        "attention_bias": has_bias(values, "attn_q"),
        "position_embedding_type": "rope" if rotated else None,
        "shared_intermediate_size": size,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": values.integer("ssm.group_count"),
        "mamba_d_state": values.integer("ssm.state_size"),
        "mamba_d_conv": values.integer("ssm.conv_kernel"),
        "mamba_expand": inner // config["hidden_size"],
    }  # fmt: skip


def lfm2(values: Hyperparameters, config: Config) -> Config:
    """LFM2. The file has the final feed-forward size, so the config switches the family's adjustment of it off."""
    return whole_heads(values, config) | {
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }

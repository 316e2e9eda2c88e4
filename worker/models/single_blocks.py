"""Nemotron-H: a layer of its checkpoints is one block, either a mixer or a feed-forward network, with one norm.

Here a layer has a mixer and then a feed-forward network. So a mixer and the network that follows it directly are one
layer, and a mixer that another mixer follows is a layer without a network. The tensors are read under the names that
they would have in such layers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.checkpoint.checkpoint import Checkpoint, RenamedTensors, UnsupportedModel
from worker.models.config_values import shown
from worker.models.family import FULL, LINEAR, Config

MODEL_TYPE = "nemotron_h"
MOE, MLP = "moe", "mlp"
LETTERS = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}  # of hybrid_override_pattern
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
MODULES = {LINEAR: "mamba", FULL: "self_attn", MOE: "mlp", MLP: "mlp"}  # a block's module in a layer
WHOLE = {"embeddings": "embed_tokens", "norm_f": "norm"}
# names of tensors: of a block, and outside the blocks; a multimodal model has a prefix before them
BLOCK = re.compile(r"(|.+\.)(?:backbone|model)\.layers\.(\d+)\.(norm|mixer)\.(.+)")
OUTSIDE = re.compile(r"(|.+\.)(?:backbone|model)\.(embeddings|norm_f)\.(.+)")
OTHERS = re.compile(r"(|.+\.)backbone\.(.+)")
SERVED: Mapping[str, tuple[Any, ...]] = {  # for settings that are only partly supported: the supported values
    "moe_latent_size": (None,), "residual_in_fp32": (False, None), "use_bias": (False, None),
    "mamba_hidden_act": ("silu", "swish"),
}  # fmt: skip


def blocks_of(config: Config) -> list[str]:
    """Returns the kinds of the blocks, which are values of LETTERS. Raises UnsupportedModel for other kinds."""
    listed, pattern = (
        config.get("layers_block_type") or config.get("layer_types"),
        config.get("hybrid_override_pattern"),
    )
    if listed:
        kinds = [OLD_NAMES.get(kind, kind) for kind in listed]
    elif pattern:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    else:
        raise UnsupportedModel("the config of this nemotron_h model lacks 'hybrid_override_pattern'")
    if unknown := set(kinds) - {*MODULES}:
        name, known = ("layers_block_type", MODULES) if listed else ("hybrid_override_pattern", LETTERS)
        raise UnsupportedModel(f"{name} {min(unknown)!r} is not supported; supported are {', '.join(known)}")
    return kinds


def layers_of(blocks: Sequence[str]) -> list[tuple[int, int | None]]:
    """Returns for each layer the indices of its two blocks: the mixer, and the network or None.

    Raises UnsupportedModel if no mixer directly precedes a network.
    """
    found: list[tuple[int, int | None]] = []
    for index, kind in enumerate(blocks):
        if kind in (LINEAR, FULL):
            found.append((index, None))
        elif found and found[-1] == (index - 1, None):
            found[-1] = (index - 1, index)
        else:
            raise UnsupportedModel(f"layer {index} of hybrid_override_pattern is not supported: no mixer precedes it")
    return found


def settings(config: Config) -> Config:
    """Returns the settings of the layers, by the names that other families have."""
    for name, served in SERVED.items():
        if config[name] not in served:
            raise UnsupportedModel(f"{name} {shown(config[name])} is not supported; supported is {served[0]!r}")
    blocks = blocks_of(config)
    layers = layers_of(blocks)
    fed = [None if second is None else blocks[second] for _, second in layers]
    return {
        "num_hidden_layers": len(layers),
        "layer_types": [blocks[first] for first, _ in layers],
        "mlp_layer_types": ["sparse" if kind == MOE else "dense" for kind in fed],
        "without_mlp": [kind is None for kind in fed],
        "mamba_n_heads": config["mamba_num_heads"], "mamba_d_head": config["mamba_head_dim"],
        "mamba_n_groups": config["n_groups"], "mamba_d_state": config["ssm_state_size"],
        "mamba_d_conv": config["conv_kernel"], "mamba_expand": None, "mamba_conv_bias": config["use_conv_bias"],
        "hidden_act": config["mlp_hidden_act"], "num_nextn_predict_layers": 0,
    }  # fmt: skip


def without_mlp(config: Config, types: Sequence[str]) -> list[dict[str, Any]]:
    """Returns for each layer whether it has no feed-forward network, as a field of LayerSpec."""
    return [{"bare": bare} for bare in config["without_mlp"]]


def renaming(config: Config) -> Callable[[str], str]:
    """Returns a function from the name of a tensor in the checkpoint to its name in a layer that has both blocks."""
    blocks = blocks_of(config)
    places = {block: layer for layer, both in enumerate(layers_of(blocks)) for block in both if block is not None}

    def renamed(name: str) -> str:
        if outside := OUTSIDE.fullmatch(name):
            return f"{outside[1]}model.{WHOLE[outside[2]]}.{outside[3]}"
        found = BLOCK.fullmatch(name)
        if found is None or int(found[2]) not in places:
            other = OTHERS.fullmatch(name)
            return name if other is None else f"{other[1]}model.{other[2]}"
        kind = blocks[int(found[2])]
        norm = "input_layernorm" if kind in (LINEAR, FULL) else "post_attention_layernorm"
        module = norm if found[3] == "norm" else MODULES[kind]
        return f"{found[1]}model.layers.{places[int(found[2])]}.{module}.{found[4]}"

    return renamed


def block_names(config: Config) -> Callable[[int, str], tuple[int, str]]:
    """Returns a function from a layer's number and a module in it to the block's number and the module in the block."""
    layers = layers_of(blocks_of(config))

    def names(layer: int, module: str) -> tuple[int, str]:
        owner, _, inner = module.partition(".")
        first, second = layers[layer]
        return second if owner == MODULES[MLP] and second is not None else first, f"mixer.{inner}"

    return names


def as_layers(checkpoint: Checkpoint, config: Config) -> RenamedTensors:
    """Returns the tensors of a checkpoint by their names in layers that have both blocks."""
    renamed = renaming(config)
    return RenamedTensors(checkpoint, {renamed(name): name for name in checkpoint.names()})

"""Reads the settings in which layers of Gemma 4 differ from each other: heads, shared K/V, and the size of the MLP."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.spec import LayerInputsSpec

Config = Mapping[str, Any]
FULL = "full_attention"
OVERRIDES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}  # setting of a layer → field of LayerSpec


def gemma4_layers(config: Config, types: Sequence[str]) -> list[dict[str, Any]]:
    """Returns for each layer those fields of its LayerSpec that do not follow from its type alone.

    types: the types of all layers

    Raises UnsupportedModel if the settings contradict each other or are not supported.
    """
    count, overrides = len(types), _overrides(config, types)
    if types[-1] != FULL:
        raise UnsupportedModel(f"the last of layer_types is {types[-1]!r}; it must be {FULL}")
    own = count - config["num_kv_shared_layers"]
    if not 0 < own <= count or set(types) - set(types[:own]):
        raise UnsupportedModel(
            f"num_kv_shared_layers {config['num_kv_shared_layers']} of {count} layers is not supported: every type of "
            "layer needs one with K/V of its own"
        )
    layers = []
    for index, kind in enumerate(types):
        shares = None if index < own else max(other for other in range(own) if types[other] == kind)
        if shares is not None and overrides[index] != overrides[shares]:
            raise UnsupportedModel(
                f"per_layer_config: layer {index} shares the K/V of layer {shares}, whose heads are others"
            )
        wide = shares is not None and config["use_double_wide_mlp"]
        details: dict[str, Any] = {
            "shares": shares,
            "sees_ahead": kind != FULL,
            "key_is_value": config["attention_k_eq_v"] and kind == FULL,
            "intermediate_size": 2 * config["intermediate_size"] if wide else 0,
        }
        layers.append(details | {field: overrides[index][name] for name, field in OVERRIDES.items()})
    return layers


def _overrides(config: Config, types: Sequence[str]) -> list[dict[str, int]]:
    """Returns the head size and the number of key heads of each layer.

    A config has common sizes for all layers, and states other sizes in one of two ways: for single layers in
    `per_layer_config`, or for all layers without a sliding window in `global_head_dim` and
    `num_global_key_value_heads`.
    """
    for name in OVERRIDES:
        if not config[name]:
            raise UnsupportedModel(f"{name} {config[name]!r} is not supported; supported are numbers from 1 on")
    plain = {name: int(config[name]) for name in OVERRIDES}
    full = plain | {"head_dim": int(config["global_head_dim"])}
    if config["attention_k_eq_v"] and config["num_global_key_value_heads"]:
        full["num_key_value_heads"] = int(config["num_global_key_value_heads"])
    stated = config.get("per_layer_config")
    if stated is None:
        return [full if kind == FULL else plain for kind in types]
    found = [dict(plain) for _ in types]
    for layer, settings in stated.items():
        if not isinstance(settings, dict) or any(not isinstance(size, int) or size < 1 for size in settings.values()):
            raise UnsupportedModel(f"per_layer_config {str(layer)[:80]} is not supported: it maps settings to sizes")
        unknown = settings.keys() - OVERRIDES.keys()
        if unknown or not str(layer).isdecimal() or int(layer) >= len(types):
            name = f"{layer}: {min(unknown)}" if unknown else str(layer)
            raise UnsupportedModel(f"per_layer_config {name} is not supported; supported are {', '.join(OVERRIDES)}")
        found[int(layer)] |= settings
    return found


def layer_inputs(config: Config) -> LayerInputsSpec | None:
    """Returns the sizes of per-layer embeddings; None if the model has none.

    Raises UnsupportedModel if the table has fewer rows than the vocabulary.
    """
    size, vocab = config["hidden_size_per_layer_input"], config["vocab_size_per_layer_input"]
    if not size:
        return None
    if vocab < config["vocab_size"]:
        raise UnsupportedModel(f"vocab_size_per_layer_input {vocab} is not supported: it is less than vocab_size")
    return LayerInputsSpec(vocab, size)

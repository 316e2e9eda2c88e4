"""Reads the config of an EAGLE-3 checkpoint: its layer, and which layers of the served model it reads.

There are two formats: a flat config like that of a Llama model with one layer, and the format of the speculators
library, with the same settings in `transformer_layer_config`. Settings of EAGLE-3 may also be in `eagle_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.model.checkpoint.checkpoint import CheckpointError, UnsupportedModel, read_config
from worker.model.families.families import spec_from_config
from worker.spec import ModelSpec

FAMILIES = ("llama", "qwen3")  # the model types that the head's layer may have
# Some checkpoints have norms [W] or [H] before the linear `fc`: the setting → the names of the norms.
NORMS_BEFORE = {"norm_before_fc": "input_norm", "fc_norm": "fc_norm.{}"}
LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The config of an EAGLE-3 draft head.

    spec: the spec of a model with only the head's layer, whose mixer reads two vectors [H] side by side.
    read: the indices of the layers of the served model whose outputs the head reads.
    draft_vocab_size: how many tokens the head's output has logits for.
    norms_before: the names of the norms before `fc`. Each is applied to an equal part of the hidden states.
    residual_normed: whether the residual stream begins with the normed hidden state. normed: as in Head.
    """

    spec: ModelSpec
    read: tuple[int, ...]
    draft_vocab_size: int
    norms_before: tuple[str, ...]
    residual_normed: bool
    normed: bool


def read_eagle_config(folder: Path, served: ModelSpec) -> EagleConfig:
    """Reads the config of an EAGLE-3 checkpoint that drafts for the model `served`.

    Raises CheckpointError, with the reason, if the config does not fit the model.
    """
    stated = read_config(folder)
    nested, layer = _object(stated, "eagle_config"), _object(stated, "transformer_layer_config")
    config = {**nested, **{name: value for name, value in stated.items() if value is not None}}
    if not _flag({"use_aux_hidden_state": True, **config}, "use_aux_hidden_state"):
        raise UnsupportedModel("use_aux_hidden_state false is not supported: EAGLE-3 reads inner layers")
    spec = _spec(stated, layer, served)
    read = _layers_read(config.get(LAYERS), len(served.layers))
    if (wide := config.get("target_hidden_size")) not in (None, served.hidden_size):
        raise CheckpointError(
            f"it reads hidden states of size {wide!r}, and the served model's have {served.hidden_size}"
        )
    return EagleConfig(
        spec,
        read,
        _draft_vocab_size(config, served),
        _norms_before(config, len(read)),
        _flag(config, "norm_before_residual"),
        _flag(config, "norm_output"),
    )


def _spec(stated: Mapping[str, Any], layer: Mapping[str, Any], served: ModelSpec) -> ModelSpec:
    outer = {key: value for key, value in stated.items() if key not in ("architectures", "transformer_layer_config")}
    spec = spec_from_config({**outer, **layer, "tie_word_embeddings": False})
    if spec.model_type not in FAMILIES:
        raise UnsupportedModel(f"an EAGLE-3 layer of model_type {spec.model_type!r} is not supported")
    if len(spec.layers) != 1:
        raise UnsupportedModel(
            f"num_hidden_layers {len(spec.layers)} is not supported: an EAGLE-3 drafter has one layer"
        )
    if spec.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"it has a vocabulary of {spec.vocab_size} tokens, and the served model one of {served.vocab_size}"
        )
    layers = (replace(spec.layers[0], mixes=2 * spec.hidden_size),)
    return replace(spec, layers=layers, eos_ids=served.eos_ids, draft_layers=0)


def _layers_read(stated: Any, count: int) -> tuple[int, ...]:
    """Returns the layers whose outputs are read. count: how many layers the served model has.

    There are two published conventions. A list that begins with 1 has the indices of these layers; any other list has
    these indices plus 1.
    """
    ids = [2, count // 2, count - 3] if stated is None else stated
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise UnsupportedModel(f"{LAYERS} must be a list of whole numbers")
    read = tuple(id if ids[0] == 1 else id - 1 for id in ids)
    if not read or len(set(read)) < len(read) or not all(0 <= layer < count for layer in read):
        raise CheckpointError(f"{LAYERS} {ids} are not different layers of the served model, which has {count}")
    return read


def _draft_vocab_size(config: Mapping[str, Any], served: ModelSpec) -> int:
    size = config.get("draft_vocab_size")
    if size is None:
        return served.vocab_size
    if type(size) is not int or not 1 <= size <= served.vocab_size:
        raise UnsupportedModel(f"draft_vocab_size must be a number from 1 to {served.vocab_size}, and is {size!r}")
    return size


def _norms_before(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    found = [name for setting, name in NORMS_BEFORE.items() if _flag(config, setting)]
    if len(found) > 1:
        raise UnsupportedModel(f"{' and '.join(NORMS_BEFORE)} exclude each other")
    return tuple(dict.fromkeys(name.format(at) for name in found for at in range(layers)))


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, False, True):
        raise UnsupportedModel(f"{name} must be true or false, and is {value!r}")
    return bool(value)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{name} must be an object")
    return value

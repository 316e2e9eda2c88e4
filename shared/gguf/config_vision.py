"""Makes the part of config.json that describes a vision tower, from the tower's file (llama.cpp's "mmproj").

llama.cpp calls a tower with its connector a projector. Each supported kind of projector is a row of PROJECTORS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shared.gguf.config_values import Config
from shared.gguf.container import Container, StoredTensor
from shared.gguf.naming import GgufError

TOWER = "clip"  # general.architecture of a tower's file
OF_TOWER = ("v.", "mm.")  # prefixes of the names of a tower's tensors; the file's other tensors are for sound
PATCHES, POSITIONS, UP = "v.patch_embd.weight", "v.position_embd.weight", "v.blk.{}.ffn_up"
FIRST, BIAS, LAYER_NORM, MERGER = "mm.1.weight", "mm.1.bias", "mm.input_norm.bias", "mm.patch_merger.weight"
WINDOW = 112  # pixels: Qwen2.5-VL's attention window, which older files do not state
Values = Callable[[Container, Config], Config]


class NotServed(GgufError):
    """The tower cannot be served with this text model, but the text model can be served without a tower."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of projector.

    models: architecture of the text model → Hugging Face's model_type of text model and tower together
    image_token: possible texts of the token that stands for images; the first text that the vocabulary has counts
    values: returns the values that only this kind has in config.json
    size: returns `size` for preprocessor_config.json
    named: other tokens that stand around images in a prompt, by their names in tokenizer_config.json
    """

    models: Mapping[str, str]
    image_token: Sequence[str]
    values: Values
    size: Callable[[Container, Config], Config]
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vision:
    """What a vision tower adds to the files of a Hugging Face checkpoint.

    kind: kind of the projector, which decides the names of tensors. config: entries of config.json
    processor: preprocessor_config.json. named: entries of tokenizer_config.json
    """

    kind: str
    config: Config
    processor: Config
    named: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def read_vision(text: Container, tower: Container) -> Vision:
    """Returns what the tower adds to the files of the text model.

    Raises NotServed for a tower whose kind is not served, and GgufError for one that does not fit the text model.
    """
    if (found := tower.text("general.architecture")) != TOWER:
        raise GgufError(f"{tower.name} is a file of {found!r}; a vision tower is a file of {TOWER!r}")
    kind = tower.text("clip.projector_type", "") or tower.text("clip.vision.projector_type", "")
    row = PROJECTORS.get(kind)
    if row is None or PATCHES not in tower.tensors:
        served = ", ".join(PROJECTORS)
        raise NotServed(f"the projector {kind[:80]!r} of {tower.name} is not served; served are {served}")
    architecture = text.text("general.architecture")
    if architecture not in row.models:
        models = ", ".join(row.models)
        raise GgufError(f"{tower.name} is a tower for {models}, not for {architecture!r} ({text.name})")
    width, own = text.integer(f"{architecture}.embedding_length"), tower.integer("clip.vision.projection_dim")
    if own != width:
        raise GgufError(f"{tower.name} makes vectors of {own} numbers; the text model {text.name} has {width}")
    token = _image_token(text, row)
    vision = _common(tower)
    tokens = dict.fromkeys(("image_token_id", "image_token_index"), token)
    config = {"model_type": row.models[architecture], "vision_config": vision, **tokens, **row.values(tower, vision)}
    texts = text.entries("tokenizer.ggml.tokens", str)
    named = {name: one for name, one in row.named.items() if one in texts}
    return Vision(kind, config, _processor(tower, row, vision), {"image_token": texts[token], **named}, _tensors(tower))


def _image_token(text: Container, row: Projector) -> int:
    texts = text.entries("tokenizer.ggml.tokens", str)
    ids = {one: texts.index(one) for one in row.image_token if one in texts}
    if not ids:
        raise NotServed(f"the vocabulary of {text.name} has no token for images, {' or '.join(row.image_token)}")
    return next(iter(ids.values()))


def _common(tower: Container) -> Config:
    """Returns vision_config. Old files state 0 as the width of the MLP, so the tensors decide."""
    patch, up = tower.integer("clip.vision.patch_size"), tower.tensors.get(UP.format(0) + ".weight")
    if patch < 1 or up is None or len(up.shape) != 2:
        raise GgufError(f"{tower.name} describes a vision tower without patches or layers")
    hidden = tower.integer("clip.vision.embedding_length")
    return {
        "image_size": tower.integer("clip.vision.image_size", 0),
        "patch_size": patch,
        "hidden_size": hidden,
        "intermediate_size": prod(up.shape) // max(hidden, 1),
        "num_hidden_layers": tower.integer("clip.vision.block_count"),
        "num_attention_heads": tower.integer("clip.vision.attention.head_count"),
        "layer_norm_eps": tower.number("clip.vision.attention.layer_norm_epsilon"),
    }


def _scale(tower: Container, default: int) -> int:
    scale = tower.integer("clip.vision.projector.scale_factor", default)
    if scale < 1:
        raise GgufError(f"{tower.name}: clip.vision.projector.scale_factor is {scale}; supported are 1 and more")
    return scale


def _idefics3(tower: Container, vision: Config) -> Config:
    return {"scale_factor": _scale(tower, 2)}


def _gemma3(tower: Container, vision: Config) -> Config:
    return {"mm_tokens_per_image": (vision["image_size"] // vision["patch_size"] // _scale(tower, 4)) ** 2}


def _of_qwen(tower: Container, vision: Config) -> Config:
    """Adds the values of Qwen's vision_config. Qwen's images may have any size."""
    vision |= {"depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"], "image_size": 0}
    vision |= {"out_hidden_size": tower.integer("clip.vision.projection_dim"), "temporal_patch_size": 2}
    vision["spatial_merge_size"] = tower.integer("clip.vision.spatial_merge_size", 2)
    return {}


def _qwen2_5(tower: Container, vision: Config) -> Config:
    every = tower.integer("clip.vision.n_wa_pattern", 0)
    if every < 1:
        raise GgufError(f"{tower.name}: clip.vision.n_wa_pattern is {every}; supported are 1 and more")
    vision["fullatt_block_indexes"] = [*range(every - 1, min(vision["num_hidden_layers"], 1 << 10), every)]
    vision["window_size"] = tower.integer("clip.vision.window_size", 0) or WINDOW
    return _of_qwen(tower, vision)


def _qwen3(tower: Container, vision: Config) -> Config:
    positions = tower.tensors.get(POSITIONS)
    vision["num_position_embeddings"] = positions.shape[0] if positions else 0
    vision["deepstack_visual_indexes"] = _deepstack(tower)
    return _of_qwen(tower, vision)


def _deepstack(tower: Container) -> list[int]:
    return [layer for layer, has in enumerate(tower.entries("clip.vision.is_deepstack_layers", bool, [])) if has]


def _pixtral(tower: Container, vision: Config) -> Config:
    """Names the model Mistral 3 if its connector merges patches, else LLaVA."""
    vision |= {"model_type": "pixtral", "hidden_act": "silu"}
    vision["rope_theta"] = tower.number("clip.rope.freq_base", 10000.0)
    biased = {"multimodal_projector_bias": BIAS in tower.tensors, "vision_feature_layer": -1}
    if MERGER not in tower.tensors:
        return {"model_type": "llava", "vision_feature_select_strategy": "full", **biased}
    return {
        "model_type": "mistral3",
        "spatial_merge_size": tower.integer("clip.vision.spatial_merge_size", 2),
        **biased,
    }


def _lfm2(tower: Container, vision: Config) -> Config:
    positions, first = tower.tensors.get(POSITIONS), tower.tensors.get(FIRST)
    vision |= {"num_patches": positions.shape[0] if positions else 0, "model_type": "siglip2_vision_model"}
    return {
        "downsample_factor": _scale(tower, 2), "projector_hidden_size": first.shape[0] if first else 0,
        "projector_bias": BIAS in tower.tensors, "projector_use_layernorm": LAYER_NORM in tower.tensors,
    }  # fmt: skip


def _published(tower: Container, vision: Config) -> Config:
    """Returns nothing: all published processors of this kind have the default size."""
    return {}


def _longest_of_config(tower: Container, vision: Config) -> Config:
    return {"longest_edge": vision["image_size"]}


def _square(tower: Container, vision: Config) -> Config:
    return {"height": vision["image_size"], "width": vision["image_size"]}


def _longest(tower: Container, vision: Config) -> Config:
    return {"longest_edge": tower.integer("clip.vision.preproc_image_size", 0) or 4 * vision["image_size"]}


def _area(least: int, most: int) -> Callable[[Container, Config], Config]:
    """Returns a function that gives the bounds on an image's pixels. least, most: the published processors' bounds"""

    def size(tower: Container, vision: Config) -> Config:
        shortest = tower.integer("clip.vision.image_min_pixels", 0) or least
        return {"shortest_edge": shortest, "longest_edge": tower.integer("clip.vision.image_max_pixels", 0) or most}

    return size


# A Gemma 3 vocabulary may lack <image_soft_token>. Its last token, which no text contains, then stands for images.
PROJECTORS: Mapping[str, Projector] = {
    "idefics3": Projector({"llama": "idefics3"}, ("<image>",), _idefics3, _longest),
    "gemma3": Projector(
        {"gemma3": "gemma3"}, ("<image_soft_token>", "<unused6241>"), _gemma3, _square,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "lfm2": Projector(
        {"lfm2": "lfm2_vl"}, ("<image>",), _lfm2, _published,
        {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"},
    ),
    "pixtral": Projector({"llama": "llava", "mistral3": "mistral3"}, ("[IMG]",), _pixtral, _longest_of_config),
    "qwen2.5vl_merger": Projector(
        {"qwen2vl": "qwen2_5_vl"}, ("<|image_pad|>",), _qwen2_5, _area(56 * 56, 28 * 28 * 16384)
    ),
    "qwen3vl_merger": Projector(
        {"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"},
        ("<|image_pad|>",), _qwen3, _area(1 << 16, 1 << 24),
    ),
}  # fmt: skip


def _processor(tower: Container, row: Projector, vision: Config) -> Config:
    channels = {name: tower.entries(f"clip.vision.{name}", float) for name in ("image_mean", "image_std")}
    return {**channels, "size": row.size(tower, vision)}


def _tensors(tower: Container) -> dict[str, StoredTensor]:
    """Returns the tensors of the tower. Connectors behind layers get consecutive numbers instead of layer numbers.

    Old converters swapped the names of the two linears of an MLP. The shapes of the tensors show this.
    """
    hidden, last = tower.integer("clip.vision.embedding_length"), {f"{at}": i for i, at in enumerate(_deepstack(tower))}
    up = tower.tensors[UP.format(0) + ".weight"].shape
    swapped = up[0] == hidden != up[1] and not any(".ffn_gate." in name for name in tower.tensors)
    found = {}
    for name, tensor in tower.tensors.items():
        parts = name.split(".")
        if name.startswith("v.deepstack.") and parts[2] in last:
            parts[2] = str(last[parts[2]])
        if swapped and len(parts) > 3 and parts[3] in ("ffn_up", "ffn_down"):
            parts[3] = "ffn_down" if parts[3] == "ffn_up" else "ffn_up"
        if name.startswith(OF_TOWER):
            found[".".join(parts)] = tensor
    return found

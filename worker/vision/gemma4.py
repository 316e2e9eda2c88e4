"""Reads the settings of Gemma 4's tower from configs, and its weights from a checkpoint."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import Shape
from worker.ops.linear.packed import PackedLinear, pack
from worker.vision.encoder import ClampedLinear, ConnectorWeights, EmbedderWeights, EncoderWeights, SandwichLayer
from worker.vision.spec import Read, TowerReader, VisionSpec

Config = Mapping[str, Any]
MOST_POSITIONS, MOST_TOKENS = 1 << 20, 1 << 14
PATCHES, POSITION_TABLE = "patch_embedder.input_proj.weight", "patch_embedder.position_embedding_table"
PROJECTION = "embed_vision.embedding_projection.weight"
NORMS = {
    "before_attention": "input_layernorm", "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm", "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
RANGES = ("input_min", "input_max", "output_min", "output_max")


def gemma4_fields(config: Config, vision: Config, processor: Config) -> dict[str, Any]:
    """Returns the fields of VisionSpec that only this family sets. Raises UnsupportedModel, which names the setting.

    config: config.json. vision: its vision_config with defaults. processor: the settings of the image processor
    """
    heads = vision["num_attention_heads"]
    wanted = {"num_key_value_heads": heads, "head_dim": vision["hidden_size"] // heads, "attention_bias": False}
    for name, only in wanted.items():
        if vision.get(name) not in (only, None):
            raise UnsupportedModel(f"vision_config: {name} {str(vision[name])[:80]} is not supported: only {only} is")
    if not isinstance(most := processor.get("max_soft_tokens", 280), int) or not 1 <= most <= MOST_TOKENS:
        raise UnsupportedModel(f"max_soft_tokens {str(most)[:80]} is not supported")
    axis = vision["position_embedding_size"]
    if not isinstance(axis, int) or not 1 <= axis <= MOST_POSITIONS:
        raise UnsupportedModel(f"vision_config: position_embedding_size {str(axis)[:80]} is not supported")
    text = config.get("text_config") or {}
    rope = vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        raise UnsupportedModel(f"vision_config: rope_type {str(kind)[:80]!r} is not supported")
    return {
        "image_size": 0, "centred": True, "position_axes": axis, "rotary_theta": float(rope.get("rope_theta", 100.0)),
        "clamped": bool(vision.get("use_clipped_linears")), "standardized": bool(vision.get("standardize")),
        "most_tokens": most, "bidirectional": text.get("use_bidirectional_attention") == "vision",
        "stands_in": text.get("pad_token_id") or 0,
    }  # fmt: skip


class Gemma4Weights:
    """The tower's weights in a checkpoint. prefix: the prefix of its tensors' names"""

    def __init__(self, reader: TowerReader, spec: VisionSpec, prefix: str) -> None:
        self._reader, self._spec, self._prefix = reader, spec, prefix
        self._projection = reader.found(PROJECTION)

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes(self._shapes())

    def load(self) -> EncoderWeights:
        """Loads the weights. Raises CheckpointError if a tensor is missing, superfluous or has a wrong shape."""
        spec, prefix, shapes = self._spec, self._prefix, self._shapes()
        read = self._reader.read(shapes, prefix)
        patches = read(prefix + PATCHES)  # the three colours are the last dimension
        patches = patches.view(spec.hidden_size, -1, 3).mT.flatten(1).contiguous()
        standard = torch.stack([read(prefix + name).float() for name in _STANDARD]) if spec.standardized else None
        projection, ones = pack(read(self._projection), invariant=True), patches.new_ones(spec.hidden_size)
        return EncoderWeights(
            patches=pack(patches, invariant=True), positions=read(prefix + POSITION_TABLE),
            layers=[self._layer(index, read) for index in range(spec.layers)], norm=None,
            connector=ConnectorWeights(projection, norm=ones, standard=standard), deepstack=[],
        )  # fmt: skip

    def _shapes(self) -> dict[str, Shape]:
        spec, prefix, hidden = self._spec, self._prefix, self._spec.hidden_size
        shapes: dict[str, Shape] = {
            prefix + PATCHES: (hidden, spec.patch_width), prefix + POSITION_TABLE: (2, spec.position_axes, hidden),
            self._projection: (spec.text_size, hidden),
        }  # fmt: skip
        shapes |= dict.fromkeys((prefix + name for name in _STANDARD), (hidden,)) if spec.standardized else {}
        for index in range(spec.layers):
            shapes |= dict(self._shapes_of_layer(self._before(index)))
        return shapes

    def _shapes_of_layer(self, layer: str) -> Iterator[tuple[str, Shape]]:
        hidden, wide = self._spec.hidden_size, self._spec.intermediate_size
        for name in NORMS.values():
            yield f"{layer}{name}.weight", (hidden,)
        for name in "qk":
            yield f"{layer}self_attn.{name}_norm.weight", (hidden // self._spec.heads,)
        for name in ATTENTION + MLP:
            shape = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.get(name, (hidden, hidden))
            yield f"{layer}{_module(name)}.linear.weight", shape
            for bound in RANGES if self._spec.clamped else ():
                yield f"{layer}{_module(name)}.{bound}", ()

    def _before(self, index: int) -> str:
        return f"{self._prefix}encoder.layers.{index}."

    def _layer(self, index: int, read: Read) -> SandwichLayer:
        layer, norms = self._before(index), {}
        for field, name in NORMS.items():
            norms[field] = read(f"{layer}{name}.weight")
        q_norm, k_norm = (self._in_halves(read(f"{layer}self_attn.{name}_norm.weight")) for name in "qk")
        linear = partial(self._linear, layer, read)
        return SandwichLayer(
            **norms, q=linear("q"), k=linear("k"), v=linear("v"), o=linear("o"), q_norm=q_norm, k_norm=k_norm,
            v_norm=torch.ones_like(q_norm), gate=linear("gate"), up=linear("up"), down=linear("down"),
        )  # fmt: skip

    def _linear(self, layer: str, read: Read, name: str) -> ClampedLinear:
        module = layer + _module(name)
        weight = read(f"{module}.linear.weight")
        if name in ("q", "k"):
            weight = self._in_halves(weight)
        packed: PackedLinear = pack(weight, invariant=True)
        low, high, least, most = (
            (read(f"{module}.{bound}").item() for bound in RANGES) if self._spec.clamped else (-inf, inf, -inf, inf)
        )
        return ClampedLinear(packed, (low, high), (least, most))

    def _in_halves(self, rows: Tensor) -> Tensor:
        """Reorders the dimensions of heads from the checkpoint's order of quarters to Sluice's order.

        In the checkpoint, the first two quarters rotate by the column, and the others by the row. In Sluice, quarters
        one and three rotate by the row, two and four by the column (attention.py).
        """
        quarter = self._spec.hidden_size // self._spec.heads // 4
        order = torch.arange(len(rows), device=rows.device).view(-1, 4, quarter)[:, [2, 0, 3, 1]]
        return rows[order.flatten()]


_STANDARD = ("std_bias", "std_scale")


def _module(name: str) -> str:
    return f"self_attn.{name}_proj" if name in ATTENTION else f"mlp.{name}_proj"


# Gemma 4 12B has no tower. Reads its settings for images from the config, and the weights that embed images.

MOST = {"patch_size": 1 << 10, "pooling_kernel_size": 64, "mm_embed_dim": 1 << 16, "mm_posemb_size": 1 << 14}
DEFAULTS = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120}
PIXELS, POSITIONS = "patch_dense.weight", "pos_embedding"
PATCH_NORMS = ("patch_ln1", "patch_ln2", "pos_norm")


def unified_fields(config: Config, vision: Config, processor: Config) -> dict[str, Any]:
    """Returns the fields of VisionSpec that config.json and its vision_config set. Raises UnsupportedModel."""
    sizes = {name: vision.get(name, default) for name, default in DEFAULTS.items()}
    sizes["max_soft_tokens"] = processor.get("max_soft_tokens", 280)
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST.get(name, 1 << 14):
            raise UnsupportedModel(f"vision_config: {name} {str(size)[:80]} is not supported")
    if (width := vision.get("output_proj_dims", sizes["mm_embed_dim"])) != sizes["mm_embed_dim"]:
        raise UnsupportedModel(f"vision_config: output_proj_dims {str(width)[:80]} is not mm_embed_dim")
    text = config.get("text_config") or {}
    side = sizes["pooling_kernel_size"]
    return {
        "image_size": 0, "patch_size": sizes["patch_size"], "side": side, "hidden_size": sizes["mm_embed_dim"],
        "intermediate_size": 0, "layers": 0, "heads": 1, "norm_eps": float(vision.get("rms_norm_eps", 1e-6)),
        "position_axes": sizes["mm_posemb_size"] * side, "most_tokens": sizes["max_soft_tokens"],
        "bidirectional": text.get("use_bidirectional_attention", "vision") == "vision",  # this family's own default
    }  # fmt: skip


class UnifiedWeights:
    """The weights in a checkpoint. prefix: the prefix of the weights' names"""

    def __init__(self, reader: TowerReader, spec: VisionSpec, prefix: str) -> None:
        self._reader, self._spec, self._prefix = reader, spec, prefix
        self._projection = reader.found(PROJECTION)

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes(self._shapes())

    def load(self) -> EmbedderWeights:
        """Loads the weights. Raises CheckpointError if a tensor is missing, superfluous or has a wrong shape."""
        prefix, shapes = self._prefix, self._shapes()
        read = self._reader.read(shapes, prefix)
        pixel_norm, norm, last_norm = (self._both(name, read) for name in PATCH_NORMS)
        positions = read(prefix + POSITIONS).transpose(0, 1).contiguous()
        # In the checkpoint, the three colours are the last dimension.
        order = torch.arange(pixel_norm.shape[1], device=norm.device).view(-1, 3).T.flatten()
        pixels = pack(read(prefix + PIXELS)[:, order], read(f"{prefix}patch_dense.bias"), invariant=True)
        projection = pack(read(self._projection), invariant=True)
        return EmbedderWeights(
            pixel_norm=pixel_norm[:, order].contiguous(), pixels=pixels, norm=norm, positions=positions,
            last_norm=last_norm, projection=projection, ones=norm.new_ones(norm.shape[1]),
        )  # fmt: skip

    def _shapes(self) -> dict[str, Shape]:
        spec, prefix, hidden = self._spec, self._prefix, self._spec.hidden_size
        width = 3 * (spec.patch_size * spec.side) ** 2
        shapes: dict[str, Shape] = {
            prefix + PIXELS: (hidden, width), f"{prefix}patch_dense.bias": (hidden,),
            prefix + POSITIONS: (spec.position_axes // spec.side, 2, hidden),
            self._projection: (spec.text_size, hidden),
        }  # fmt: skip
        for name in PATCH_NORMS:
            shapes |= {
                f"{prefix}{name}.{kind}": (width if name == PATCH_NORMS[0] else hidden,) for kind in ("weight", "bias")
            }
        return shapes

    def _both(self, norm: str, read: Read) -> Tensor:
        return torch.stack([read(f"{self._prefix}{norm}.{kind}") for kind in ("weight", "bias")])

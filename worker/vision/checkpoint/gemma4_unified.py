"""Gemma 4 12B has no tower. Reads its settings for pictures from the config, and the weights that embed pictures."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker.kernels.linear import pack
from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.checkpoint.stored_weight import Shape
from worker.vision.checkpoint.reading import Read, TowerReader
from worker.vision.embedder import EmbedderWeights
from worker.vision.spec import VisionSpec

Config = Mapping[str, Any]
MOST = {"patch_size": 1 << 10, "pooling_kernel_size": 64, "mm_embed_dim": 1 << 16, "mm_posemb_size": 1 << 14}
DEFAULTS = {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120}
PIXELS, POSITIONS = "patch_dense.weight", "pos_embedding"
PROJECTION = "embed_vision.embedding_projection.weight"
NORMS = ("patch_ln1", "patch_ln2", "pos_norm")


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
        pixel_norm, norm, last_norm = (self._both(name, read) for name in NORMS)
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
        for name in NORMS:
            shapes |= {
                f"{prefix}{name}.{kind}": (width if name == NORMS[0] else hidden,) for kind in ("weight", "bias")
            }
        return shapes

    def _both(self, norm: str, read: Read) -> Tensor:
        return torch.stack([read(f"{self._prefix}{norm}.{kind}") for kind in ("weight", "bias")])

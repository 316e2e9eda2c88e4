"""Reads the weights of a tower and its connector from a checkpoint, whichever names its layout gives them.

The tower is found by its patch embedding, and the connector by its projection: layouts differ in what stands before.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from worker.kernels.linear import PackedLinear, pack
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.expected_tensors import check_tensors
from worker.model.checkpoint.stored_weight import PlainWeight, Shape, StoredTensors, WeightSource
from worker.model.source import open_source
from worker.vision.connectors import ConnectorWeights
from worker.vision.encoder import EncoderLayer, EncoderWeights
from worker.vision.spec import Connector, VisionSpec

PATCHES = "embeddings.patch_embedding"
POSITIONS = "embeddings.position_embedding.weight"
LAST_NORM = "post_layernorm"
UNREAD = ("head.",)  # SigLIP's own pooling, which no text model reads
PROJECTIONS: Mapping[Connector, str] = {
    "shuffle": "modality_projection.proj.weight",
    "pool": "mm_input_projection_weight",
}
SOFT_NORM = "mm_soft_emb_norm.weight"
QKV, OUT = tuple(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj"
UP, DOWN = "mlp.fc1", "mlp.fc2"
NORMS = "layer_norm1", "layer_norm2"


def load_tower(folder: Path, spec: VisionSpec, dtype: torch.dtype, device: torch.device) -> EncoderWeights | None:
    """Loads the tower in `dtype` on a device; None if the checkpoint has no tower, as a file of text weights alone.

    Raises CheckpointError when a tensor is missing, misshaped or stored in few bits, or a file is broken.
    """
    with closing(open_source(folder, None)) as source:
        prefix = _before(source.tensors, PATCHES + ".weight")
        return None if prefix is None else _Loader(source, spec, prefix, dtype, device).load()


def _before(tensors: StoredTensors, ending: str) -> str | None:
    """Returns what stands before this ending in the name of a tensor; None if no tensor has it."""
    found = (name.removesuffix(ending) for name in tensors.names() if f".{name}".endswith(f".{ending}"))
    return min(found, key=len, default=None)


class _Loader:
    """Performs one load: lists all tensors, checks them, and then reads them."""

    def __init__(
        self, source: WeightSource, spec: VisionSpec, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source, self._spec, self._prefix = source, spec, prefix
        self._dtype, self._device = dtype, device
        self._projection = self._found(PROJECTIONS[spec.connector])
        self._soft_norm = self._found(SOFT_NORM) if spec.connector == "pool" else ""

    def _found(self, ending: str) -> str:
        before = _before(self._source.tensors, ending)
        if before is None:
            raise CheckpointError(f"{self._source.tensors.folder}: tensor {ending} is missing")
        return before + ending

    def load(self) -> EncoderWeights:
        shapes = self._shapes()
        check_tensors(
            self._source, [PlainWeight(*each) for each in shapes.items()], self._prefix,
            tuple(self._prefix + name for name in UNREAD),
        )  # fmt: skip
        read = self._reader(shapes)
        spec = self._spec
        patches = read(f"{self._prefix}{PATCHES}.weight").reshape(spec.hidden_size, spec.patch_width)
        return EncoderWeights(
            patches=pack(patches, read(f"{self._prefix}{PATCHES}.bias"), invariant=True),
            positions=self._positions(read),
            layers=[self._layer(f"{self._prefix}encoder.layers.{index}.", read) for index in range(spec.layers)],
            norm=_layer_norm(self._prefix + LAST_NORM, read),
            connector=self._connector(read),
        )

    def _shapes(self) -> dict[str, Shape]:
        spec, prefix = self._spec, self._prefix
        hidden, wide, patch = spec.hidden_size, spec.intermediate_size, spec.patch_size
        shapes: dict[str, Shape] = {
            f"{prefix}{PATCHES}.weight": (hidden, 3, patch, patch),
            f"{prefix}{PATCHES}.bias": (hidden,),
            prefix + POSITIONS: (spec.grid**2, hidden),
        }
        linears = {**dict.fromkeys((*QKV, OUT), (hidden, hidden)), UP: (wide, hidden), DOWN: (hidden, wide)}
        for layer in (f"{prefix}encoder.layers.{index}." for index in range(spec.layers)):
            for name, shape in linears.items():
                shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
            shapes |= _both((layer + norm for norm in NORMS), hidden)
        shapes |= _both([prefix + LAST_NORM], hidden)
        if spec.connector == "shuffle":
            return shapes | {self._projection: (spec.text_size, hidden * spec.side**2)}
        return shapes | {self._projection: (hidden, spec.text_size), self._soft_norm: (hidden,)}

    def _positions(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the position of each patch, [grid * grid, H].

        Of some grids, such as one of 19, rounding gives a few patches the position before their own. So it does in
        transformers, and in training.
        """
        stored, grid = read(self._prefix + POSITIONS), self._spec.grid
        if not self._spec.bucketed:
            return stored
        edges = torch.arange(1 / grid, 1.0, 1 / grid)
        places = (torch.arange(grid, dtype=torch.float32) * (1.0 / torch.tensor(grid))).clamp(max=1.0 - 1e-6)
        along = torch.bucketize(places, edges, right=True)
        return stored[(along[:, None] * grid + along[None, :]).flatten().to(stored.device)]

    def _reader(self, shapes: Mapping[str, Shape]) -> Callable[[str], Tensor]:
        def read(name: str) -> Tensor:
            into = torch.empty(shapes[name], dtype=self._dtype, device=self._device)
            self._source.tensors.copy(name, into)
            return into

        return read

    def _layer(self, prefix: str, read: Callable[[str], Tensor]) -> EncoderLayer:
        def linear(*names: str) -> PackedLinear:
            weight, bias = (
                torch.cat([read(f"{prefix}{name}.{kind}") for name in names]) for kind in ("weight", "bias")
            )
            return pack(weight, bias, invariant=True)

        before_attention, before_mlp = (_layer_norm(prefix + name, read) for name in NORMS)
        return EncoderLayer(
            before_attention=before_attention, qkv=linear(*QKV), o=linear(OUT), before_mlp=before_mlp,
            up=linear(UP), down=linear(DOWN),
        )  # fmt: skip

    def _connector(self, read: Callable[[str], Tensor]) -> ConnectorWeights:
        projection = read(self._projection)
        if self._spec.connector == "shuffle":
            return ConnectorWeights(pack(projection, invariant=True))
        return ConnectorWeights(pack(projection.T.contiguous(), invariant=True), read(self._soft_norm))


def _both(names: Iterable[str], hidden: int) -> dict[str, Shape]:
    return {f"{name}.{kind}": (hidden,) for name in names for kind in ("weight", "bias")}


def _layer_norm(name: str, read: Callable[[str], Tensor]) -> Tensor:
    return torch.stack([read(f"{name}.weight"), read(f"{name}.bias")])

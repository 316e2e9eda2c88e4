"""Reads the weights of a tower and its connector from a checkpoint of any layout.

The tower is found by the name of its patch embedding, and the connector by the names of its projections, because
layouts differ in the prefixes of names.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel, read_config
from worker.checkpoint.stored_weight import Shape, WeightSource
from worker.models.load import open_source
from worker.ops.linear.packed import PackedLinear, pack
from worker.vision.encoder import ConnectorWeights, EmbedderWeights, EncoderLayer, EncoderWeights
from worker.vision.families import FAMILIES, vision_spec
from worker.vision.gemma4 import PATCHES, PIXELS, Gemma4Weights, UnifiedWeights
from worker.vision.spec import (
    APART,
    FRAMES,
    MERGER,
    MERGER_NORM,
    NAMES,
    PROJECTIONS,
    SOFT_NORM,
    Layout,
    Read,
    TowerReader,
    VisionSpec,
    before,
)
from worker.vision.vision import Tower


def load_tower(
    folder: Path, spec: VisionSpec, dtype: torch.dtype, device: torch.device
) -> EncoderWeights | EmbedderWeights | None:
    """Loads the tower in `dtype` on a device; None if the checkpoint has no tower, as with only text weights.

    Raises CheckpointError if a tensor is missing, has a wrong shape or is quantized, or if a file is broken.
    """
    with closing(open_source(folder, None)) as source:
        found = _loader(source, spec, dtype, device)
        return None if found is None else found.load()


def tower_bytes(folder: Path, spec: VisionSpec, dtype: torch.dtype) -> int:
    """Returns how many bytes the tower takes in memory; 0 without a tower. Raises the same errors as load_tower."""
    with closing(open_source(folder, None)) as source:
        found = _loader(source, spec, dtype, torch.device("cpu"))
        return 0 if found is None else found.nbytes


def _loader(
    source: WeightSource, spec: VisionSpec, dtype: torch.dtype, device: torch.device
) -> "_Loader | Gemma4Weights | UnifiedWeights | None":
    first, make = LOADERS.get(spec.layout) or (NAMES[spec.layout].patches + ".weight", _Loader)
    prefix = before(source.tensors, first)
    return None if prefix is None else make(TowerReader(source, dtype, device), spec, prefix)


class _Loader:
    """Performs one load: lists all tensors, checks them, and then reads them."""

    def __init__(self, reader: TowerReader, spec: VisionSpec, prefix: str) -> None:
        self._reader, self._spec, self._prefix, names = reader, spec, prefix, NAMES[spec.layout]
        self._source, self._found = reader.source, reader.found
        apart = f"{prefix}{names.layers}0.{APART[0]}.weight" in self._source.tensors
        self._names = replace(names, qkv=APART) if apart else names
        stored = self._source.tensors.shape(prefix + names.patches + FRAMES[0])
        self._colours_last = names.colours_last and len(stored) == 2  # else a convolution, as in GGUF files
        self._by_frame = prefix + names.patches + FRAMES[1] in self._source.tensors
        end = "" if self._names.bare else ".weight"
        projections = self._names.projections or PROJECTIONS[spec.connector]
        self._projections = [self._found(name + end).removesuffix(end) for name in projections]
        self._soft_norm = self._found(SOFT_NORM) if spec.connector == "pool" else ""
        self._merger = [self._found(name) for name in (MERGER_NORM, MERGER)] if spec.connector_eps else []
        weight = f"{self._names.joined_norm}.weight"
        self._joined_norm = self._found(weight).removesuffix(".weight") if spec.joined_eps else ""

    def load(self) -> EncoderWeights:
        shapes, names = self._shapes(), self._names
        read = self._reader.read(shapes, self._prefix, tuple(self._prefix + name for name in names.unread))
        return EncoderWeights(
            patches=self._patches(read),
            positions=self._positions(read) if names.positions else None,
            layers=[self._layer(f"{self._prefix}{names.layers}{index}.", read) for index in range(self._spec.layers)],
            norm=self._norm(self._prefix + names.last_norm, read) if names.last_norm else None,
            first_norm=self._norm(self._prefix + names.first_norm, read) if names.first_norm else None,
            connector=self._connector(self._projections, read, self._joined_norm),
            deepstack=[self._connector(names, read, norm) for norm, *names in self._stacked()],
        )

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes(self._shapes())

    def _shapes(self) -> dict[str, Shape]:
        spec, prefix, names = self._spec, self._prefix, self._names
        hidden, wide, patch = spec.hidden_size, spec.intermediate_size, (spec.patch_size, spec.patch_size)
        stored = spec.position_side or spec.grid_of(spec.image_size, 0)[0]
        of_patch = (spec.patch_width,) if self._colours_last else (3, *([spec.frames] * (spec.frames > 1)), *patch)
        shapes: dict[str, Shape] = {prefix + names.patches + FRAMES[0]: (hidden, *of_patch)}
        if self._by_frame:
            shapes |= {prefix + names.patches + kind: (hidden, 3, *patch) for kind in FRAMES}
        if names.biased:
            shapes[f"{prefix}{names.patches}.bias"] = (hidden,)
        if names.positions:
            shapes[prefix + names.positions] = (stored**2, hidden)
        rows = 3 * hidden // len(names.qkv)
        linears = {**dict.fromkeys(names.qkv, (rows, hidden)), names.out: (hidden, hidden)}
        linears |= {**dict.fromkeys(names.up, (wide, hidden)), names.down: (hidden, wide)}
        for layer in (f"{prefix}{names.layers}{index}." for index in range(spec.layers)):
            for name, shape in linears.items():
                shapes |= _linear_shapes(layer + name, shape, biased=names.layers_biased)
            shapes |= self._norm_shapes((layer + norm for norm in names.norms), hidden)
        norms = (prefix + name for name in (names.first_norm, names.last_norm) if name)
        return shapes | self._norm_shapes(norms, hidden) | self._shapes_of_connector()

    def _shapes_of_connector(self) -> dict[str, Shape]:
        spec, joined = self._spec, self._spec.hidden_size * self._spec.side**2
        first = self._projections[0]
        if spec.connector == "shuffle":
            return {first: (spec.text_size, joined)}
        if spec.connector == "pool":
            return {first: (spec.hidden_size, spec.text_size), self._soft_norm: (spec.hidden_size,)}
        shapes: dict[str, Shape] = {}
        if self._merger:
            shapes |= zip(self._merger, ((spec.hidden_size,), (spec.hidden_size, joined)), strict=True)
        if spec.layout == "pixtral":
            linears = ((spec.text_size, spec.hidden_size), (spec.text_size, spec.text_size))
        else:
            between = spec.connector_size or joined
            linears = ((between, joined), (spec.text_size, between))
        stacked = self._stacked()
        for names in (self._projections, *(names for _, *names in stacked)):
            for name, shape in zip(names, linears, strict=True):
                shapes |= _linear_shapes(name, shape, biased=spec.connector_biased)
        norms = [self._joined_norm] if self._joined_norm else []
        return shapes | self._norm_shapes((*norms, *(norm for norm, *_ in stacked)), joined)

    def _norm_shapes(self, names: Iterable[str], hidden: int) -> dict[str, Shape]:
        kinds = ("weight",) if self._names.rms else ("weight", "bias")
        return {f"{name}.{kind}": (hidden,) for name in names for kind in kinds}

    def _norm(self, name: str, read: Read) -> Tensor:
        weight = read(f"{name}.weight")
        return weight if self._names.rms else torch.stack([weight, read(f"{name}.bias")])

    def _stacked(self) -> list[list[str]]:
        """Returns the names of the deepstack connectors' tensors: the norm, and then the projections."""
        own = [name.rpartition(".")[2] for name in self._names.projections]
        stack = self._prefix + self._names.deepstack
        return [[f"{stack}{index}.{name}" for name in ("norm", *own)] for index in range(len(self._spec.deepstack))]

    def _positions(self, read: Read) -> Tensor:
        """Returns the position embeddings [grid * grid, H]: one for each patch, or a grid to stretch over images.

        In some grids, for example with 19 patches a side, rounding gives a few patches the position of the patch before
        them. The models were trained with this error, so it is kept.
        """
        stored, spec = read(self._prefix + self._names.positions), self._spec
        if not spec.bucketed:
            return stored
        grid, _ = spec.grid_of(spec.image_size, 0)
        edges = torch.arange(1 / grid, 1.0, 1 / grid)
        places = (torch.arange(grid, dtype=torch.float32) * (1.0 / torch.tensor(grid))).clamp(max=1.0 - 1e-6)
        along = torch.bucketize(places, edges, right=True)
        return stored[(along[:, None] * grid + along[None, :]).flatten().to(stored.device)]

    def _patches(self, read: Read) -> PackedLinear:
        """Reads the patch embedding, which has one tensor for each of two frames in GGUF files."""
        name = self._prefix + self._names.patches
        if self._by_frame:
            weight = torch.stack([read(name + kind) for kind in FRAMES], dim=2)
        else:
            weight = read(name + FRAMES[0])
        if self._colours_last:
            weight = weight.view(len(weight), -1, 3).mT
        return pack(
            weight.flatten(1).contiguous(), read(f"{name}.bias") if self._names.biased else None, invariant=True
        )

    def _layer(self, prefix: str, read: Read) -> EncoderLayer:
        names = self._names
        linear = partial(_linear, biased=names.layers_biased)
        before_attention, before_mlp = (self._norm(prefix + name, read) for name in names.norms)
        return EncoderLayer(
            before_attention=before_attention, qkv=linear([prefix + name for name in names.qkv], read),
            o=linear([prefix + names.out], read), before_mlp=before_mlp,
            up=linear([prefix + name for name in names.up], read), down=linear([prefix + names.down], read),
        )  # fmt: skip

    def _connector(self, names: list[str], read: Read, norm: str = "") -> ConnectorWeights:
        first, *others = names
        if self._spec.connector == "shuffle":
            return ConnectorWeights(pack(read(first), invariant=True))
        if self._spec.connector == "pool":
            return ConnectorWeights(pack(read(first).T.contiguous(), invariant=True), norm=read(self._soft_norm))
        joined_norm = self._norm(norm, read) if norm else None
        linear = partial(_linear, biased=self._spec.connector_biased)
        found = ConnectorWeights(linear(others, read), before=linear([first], read), joined_norm=joined_norm)
        if not self._merger:
            return found
        of_patch, merging = map(read, self._merger)
        # Columns of `merging` are in the order channel, patch; the rows that it multiplies, in the order patch,
        # channel.
        by_patch = merging.view(len(merging), self._spec.hidden_size, -1).mT.flatten(1).contiguous()
        return replace(found, norm=of_patch, joined=pack(by_patch, invariant=True))


def _linear_shapes(name: str, shape: Shape, *, biased: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if biased else {})


def _linear(names: Iterable[str], read: Read, *, biased: bool = True) -> PackedLinear:
    """Reads several linears as one, with their biases. A convolution over patches is read as a linear, too."""
    weight, bias = (
        torch.cat([read(f"{name}.{kind}") for name in names]) if kind == "weight" or biased else None
        for kind in ("weight", "bias")
    )
    assert weight is not None
    return pack(weight.flatten(1), bias, invariant=True)


# The ending of the name by which a tower is found, and its loader; _Loader loads the other towers.
LOADERS: Mapping[Layout, tuple[str, type[Gemma4Weights] | type[UnifiedWeights]]] = {
    "gemma4": (PATCHES, Gemma4Weights), "gemma4_unified": (PIXELS, UnifiedWeights),
}  # fmt: skip


# Loads the tower of a checkpoint, or logs why images are not supported. Text works in any case.

log = logging.getLogger("sluice.load")


def tower_of(folder: Path, text_size: int, dtype: torch.dtype, device: torch.device) -> Tower:
    """Loads the tower of a checkpoint whose config states one.

    text_size: hidden size of the text model. Raises CheckpointError if a tensor of a supported tower is missing or
    has a wrong shape, or if a file is broken.
    """
    config = read_config(folder)
    try:
        spec = vision_spec(folder, config, text_size)
    except UnsupportedModel as error:
        return _without(str(error))
    if spec is None:
        if reason := (config.get("vision_config") or {}).get("not_served"):  # set for the mmproj file of a GGUF model
            return _without(str(reason))
        served = ", ".join(sorted(FAMILIES))
        return _without(f"the images of {config.get('model_type')!r} are not served; those of {served} are")
    weights = load_tower(folder, spec, dtype, device)
    if weights is None:
        return _without("the checkpoint has no weights of a vision tower")
    log.info("images are served: %s", config.get("model_type"))
    return Tower(spec, weights, "")


def bytes_of_tower(folder: Path, text_size: int, dtype: torch.dtype) -> int:
    """Returns how many bytes tower_of will load; 0 if images are not served. Raises the same error as tower_of."""
    try:
        spec = vision_spec(folder, read_config(folder), text_size)
    except UnsupportedModel:  # tower_of says why
        return 0
    return 0 if spec is None else tower_bytes(folder, spec, dtype)


def layers_with_vectors(folder: Path, text_size: int) -> int:
    """Returns how many of the text model's first layers get vectors of images added to them (deepstack)."""
    try:
        spec = vision_spec(folder, read_config(folder), text_size)
    except UnsupportedModel:  # tower_of says why
        return 0
    return 0 if spec is None else len(spec.deepstack)


def _without(reason: str) -> Tower:
    log.warning("text alone is served: %s", reason)
    return Tower(missing=reason)

"""Loads the weights of an encoder: the layers by the loader of decoders, under its names, and what only encoders have:
tables of positions and token types, a norm of embeddings, a classification head, linears after pooling.

A checkpoint in safetensors has the names of its family, which `common_names` translates. A GGUF file is read under the
common names already (worker/quantization/gguf_tensors.py).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shared.gguf.naming import INDEX as GGUF_INDEX
from shared.hf_hub import Progress
from worker.checkpoint.checkpoint import Checkpoint, CheckpointError, RenamedTensors, read_config
from worker.checkpoint.staging import Staging
from worker.checkpoint.stored_weight import (
    PLAIN,
    PlainWeight,
    Shape,
    StoredTensors,
    WeightSource,
    check_finite,
    check_tensors,
)
from worker.encoder.families import ENCODERS, DenseSpec, EncoderSpec, HeadSpec, Names
from worker.kv_cache.sizing import WeightsSize
from worker.models.decoder import Layer
from worker.models.layer_kinds import norm_weights
from worker.models.load import FileSource, Keeper, Kept, Loader, open_source
from worker.ops.embedding import Embedding
from worker.ops.linear.packed import PackedLinear, pack_stacked
from worker.ops.quantized_weight import QuantizedWeight
from worker.quantization.methods import InMemory, method_of
from worker.spec import LayerSpec

PREFIX = "model."
POSITIONS, TYPES, EMBED_NORM = (f"{PREFIX}embed_{name}" for name in ("positions", "types", "norm"))
KINDS = {"gamma": "weight", "beta": "bias"}  # what old checkpoints call the weight and the bias of a norm


@dataclass(frozen=True, slots=True)
class Head:
    """A classification head: see HeadSpec. A norm is [2, H]."""

    dense: PackedLinear | None
    norm: Tensor | None
    out: PackedLinear


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights of an encoder, on one device. Tables and norms are None where the encoder has none."""

    embed: Embedding  # [vocab, H]
    positions: Tensor | None  # [positions, H]
    types: Tensor | None  # [token types, H]
    embed_norm: Tensor | None
    layers: list[Layer]
    last_norm: Tensor | None
    head: Head | None
    dense: tuple[PackedLinear, ...]  # float32

    @property
    def nbytes(self) -> int:
        """How many bytes the tables and the linears of the layers take in memory."""
        tables = sum(one.nbytes for one in (self.embed, self.positions, self.types) if one is not None)
        return tables + sum(linear.nbytes for layer in self.layers for linear in layer.linears)


def common_names(stored: Checkpoint, names: Sequence[Names]) -> RenamedTensors:
    """Returns the tensors of a checkpoint under the common names of modules (worker/models/layer_kinds.py).

    A tensor of the encoder that has no common name gets the prefix of the encoder, so that the loader refuses it.
    Tensors outside of the encoder, such as a classification head, keep their names.
    """
    own = stored.names()
    chosen = next((one for one in names if any(_within(name, one)[0] for name in own)), names[0])
    return RenamedTensors(stored, {_common(name, chosen): name for name in own})


def _within(name: str, names: Names) -> tuple[str, str]:
    """Returns the number of the layer and the rest of a tensor's name, ("", the name) outside the layers. Prefixes are
    removed from names of the encoder."""
    for prefix in names.prefixes:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    number, _, rest = name.removeprefix(names.layers).partition(".")
    return (number, rest) if name.startswith(names.layers) and number.isdecimal() else ("", name)


def _common(name: str, names: Names) -> str:
    layer, rest = _within(name, names)
    if rest.startswith(names.unread) and not layer:
        return name
    module, _, kind = rest.rpartition(".")
    # a quantized weight has several tensors, whose names begin with that of the module
    found = (names.layer if layer else names.whole).get(module)
    kind = KINDS.get(kind, kind)
    if found is not None:
        return f"{PREFIX}layers.{layer}.{found}.{kind}" if layer else f"{PREFIX}{found}.{kind}"
    roots = {one.partition(".")[0] for one in names.whole}
    return f"{PREFIX}{rest}" if layer or rest.partition(".")[0] in roots else name


@dataclass
class EncoderLoader(Loader):
    """Loads an encoder. Norms that it lacks are None, and there is no output head."""

    encoder: EncoderSpec | None = None

    def __post_init__(self) -> None:
        Loader.__post_init__(self)
        self.head = None  # vectors need no output head, also if a checkpoint has one

    @property
    def _is_read_from_head(self) -> bool:
        return False

    @property
    def own(self) -> EncoderSpec:
        assert self.encoder is not None
        return self.encoder

    def norms_of_layer(self, prefix: str, layer: LayerSpec) -> dict[str, Sequence[PlainWeight]]:
        """Returns the stored tensors of a layer's norms; the first layer may have none before attention."""
        found = Loader.norms_of_layer(self, prefix, layer)
        if not self.own.first_norm and prefix == f"{self.prefix}layers.0.":
            del found["before_attention"]
        return found

    def read_encoder(self) -> EncoderWeights:
        """Reads all weights. Raises the same errors as `load`."""
        spec, hidden = self.own, self.spec.hidden_size
        tables = [PlainWeight(f"{POSITIONS}.weight", (spec.positions, hidden))] if spec.positions else []
        tables += [PlainWeight(f"{TYPES}.weight", (spec.token_types, hidden))] if spec.token_types else []
        embed_norm = norm_weights(self.spec, EMBED_NORM, hidden) if spec.embed_norm else []
        last_norm = self._last_norm() if spec.last_norm else []
        weights: list[Kept] = [(self.embed, None), *((one, None) for one in (*tables, *embed_norm, *last_norm))]
        for prefix, layer in self._layers():
            weights += self.weights_of_layer(prefix, layer)
        self.total = check_tensors(self.source, [weight for weight, _ in weights], self.prefix, self._unread())
        self.on_size(WeightsSize(Keeper(self.dtype, self.device).nbytes(weights) - self.spared))
        self.source.tensors.expect(tensor.name for weight, _ in weights for tensor in weight.tensors())
        self.on_progress(0, self.total)
        embed = self.as_embedding(self._widened(self.embed))
        read = [self._vector(table) for table in tables]
        norms = [self.norm(parts) if parts else None for parts in (embed_norm, last_norm)]
        return EncoderWeights(
            embed=embed,
            positions=read[0] if spec.positions else None,
            types=read[-1] if spec.token_types else None,
            embed_norm=norms[0],
            last_norm=norms[1],
            layers=self._read_layers(),
            head=None if spec.head is None else self._classifier(spec.head),
            dense=tuple(self._dense(one) for one in spec.dense),
        )

    def _classifier(self, head: HeadSpec) -> Head:
        hidden, tensors = self.spec.hidden_size, self.source.tensors
        dense = _linear(tensors, head.dense, hidden, hidden, head.dense_bias) if head.dense else None
        weight = _floats(tensors, f"{head.norm}.weight", (hidden,)) if head.norm else None
        return Head(
            dense,
            None if weight is None else torch.stack((weight, torch.zeros_like(weight))),
            _linear(tensors, head.out, head.labels, hidden, head.out_bias),
        )

    def _dense(self, spec: DenseSpec) -> PackedLinear:
        module = spec.weight.removesuffix(".weight")
        if f"{spec.folder}.weight" in self.source.tensors:  # a GGUF file has them in the file of the layers
            stored = self.source.weight(f"{spec.folder}.weight", (spec.outputs, spec.inputs))
            read = stored.read(self._tensor, torch.float32)
            plain = read.dequantize(torch.float32) if isinstance(read, QuantizedWeight) else read
            return pack_stacked([plain], dtype=torch.float32, invariant=True)
        with closing(Checkpoint(self.source.tensors.folder / spec.folder)) as tensors:
            return _linear(tensors, module, spec.outputs, spec.inputs, spec.bias)


def _floats(tensors: StoredTensors, name: str, shape: Shape) -> Tensor:
    """Reads a tensor as float32. Raises CheckpointError if it is missing, misshaped, or not of plain numbers."""
    if name not in tensors:
        raise CheckpointError(f"{tensors.folder}: tensor {name} is missing")
    if tensors.shape(name) != shape or tensors.format(name) not in PLAIN:
        raise CheckpointError(
            f"{tensors.where(name)}: tensor {name} has shape {list(tensors.shape(name))} and is stored as "
            f"{tensors.format(name)}; it must be {list(shape)} of {', '.join(PLAIN)}"
        )
    read = torch.empty(shape, dtype=torch.float32)
    tensors.copy(name, read)
    return check_finite(read, name, tensors)


def _linear(tensors: StoredTensors, module: str, outputs: int, inputs: int, bias: bool) -> PackedLinear:
    weight = _floats(tensors, f"{module}.weight", (outputs, inputs))
    own_bias = _floats(tensors, f"{module}.bias", (outputs,)) if bias else None
    return pack_stacked([weight], own_bias, dtype=torch.float32, invariant=True)


def load_encoder(
    folder: Path,
    spec: EncoderSpec,
    dtype: torch.dtype,
    *,
    memory: InMemory,
    on_progress: Progress = lambda done, total: None,
    on_size: Callable[[WeightsSize], None] = lambda size: None,
) -> EncoderWeights:
    """Loads an encoder to the CPU, with packed linears. Weights in full precision become `dtype`.

    memory, on_progress, on_size: as for `worker.models.load.load`

    Raises CheckpointError when a tensor is missing, superfluous, misshaped or has invalid numbers, or a file is broken.
    """
    device = torch.device("cpu")
    with closing(_source(folder, spec, Staging(device))) as source:
        loader = EncoderLoader(
            source, spec.model, dtype, device, True, memory, on_progress, on_size, encoder=spec
        )  # fmt: skip
        return loader.read_encoder()


def _source(folder: Path, spec: EncoderSpec, staging: Staging) -> WeightSource:
    row = ENCODERS.get(spec.model.model_type)
    if row is None or (folder / GGUF_INDEX).exists():
        return open_source(folder, staging)
    tensors = Checkpoint(folder, staging)
    return FileSource(common_names(tensors, row.names), method_of(read_config(folder)))

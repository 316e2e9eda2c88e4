"""Loads the weights of a decoder from a checkpoint, layer by layer, so that at most one linear is in memory twice.

The spec determines which weights a checkpoint must hold, and the checkpoint says how it stores each
(worker/checkpoint/stored_weight.py). Names, shapes and formats are checked before any weight is read. Projections with
the same input are stacked into one linear; each projection may be stored in a format of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.gguf.naming import INDEX as GGUF_INDEX
from shared.hf_hub import Progress
from shared.machine import kept_free_memory
from worker.checkpoint.checkpoint import Checkpoint, read_config
from worker.checkpoint.staging import Staging
from worker.checkpoint.stored_weight import (
    EMBED,
    WEIGHT,
    Layout,
    PlainWeight,
    Shape,
    StackedLinear,
    StoredTensors,
    StoredWeight,
    WeightSource,
    check_finite,
    check_finite_blocks,
    check_read,
    check_tensors,
    find_embedding,
    find_head,
)
from worker.kv_cache.sizing import WeightsSize
from worker.models import single_blocks
from worker.models.decoder import Layer, Weights
from worker.models.layer_kinds import LayerNames, StoredPart, feed_forward, layer_norms, mixer, norm, norm_weights
from worker.models.per_layer_embeddings import (
    PerLayerInput,
    PerLayerInputs,
    StoredPerLayerInputs,
    own_linears,
    own_norm,
)
from worker.models.sharding import Share, Stage
from worker.ops import native as c_library
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.embedding import Embedding, in_head, plain
from worker.ops.linear.packed import PackedLinear, pack_quantized, pack_stacked
from worker.ops.moe.packed import PackedExperts, pack_experts, pack_quantized_experts
from worker.ops.native import Pieces
from worker.ops.quantized_weight import QuantizedWeight
from worker.quantization.methods import AS_STORED, InMemory, Method, in_memory, method_of
from worker.spec import LayerSpec, ModelSpec

HEAD, NORM = "lm_head", "norm"
CLASSIFIER = "score"  # the head of a classifier
GATES = "gates"  # the field for rows marked `apart`, in the weights of a mixer or feed-forward network
Part = Tensor | QuantizedWeight | BlockRows  # a weight that has been read, or some of its rows
# a weight, and the layout to which it is quantized in memory (None: full precision)
Kept = tuple[StoredWeight, Layout | None]


def load(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
    memory: InMemory = AS_STORED,
    on_progress: Progress = lambda done, total: None,
    on_size: Callable[[WeightsSize], None] = lambda size: None,
    share: Share | None = None,
    stage: Stage | None = None,
) -> Weights:
    """Loads all weights to `device`, with packed linears. Weights in full precision become `dtype`.

    invariant: see worker/ops/linear/packed.py.
    memory: how the linears of the layers are kept in memory. Embedding and head are never quantized here: the head
        decides between tokens with close logits, and a tied head is the embedding, whose rows are looked up. A head
        that the checkpoint stores quantized stays quantized unless all linears are widened to `dtype`; an embedding
        is widened unless it can stay in the blocks of a GGUF file (worker/ops/embedding). Inputs of the head are never
        rounded to 8 bits: this would be a third of the loss, and a head reads so much memory that the conversion of its
        codes hides behind it.
    on_progress: called with (done, total) bytes of the checkpoint, from (0, total) to (total, total)
    on_size: called before on_progress with the size of the weights in memory; it may raise to end the load
    share: which part of each layer this process loads; None: all of it
    stage: which layers this process loads; None: all. Behind the first stage, embedding and head are one row of zeros.
        Even with a share or a stage, on_size gets the size of the whole model.

    Raises CheckpointError when a tensor is missing, superfluous, misshaped or has invalid numbers, or a file is broken.
    """
    with closing(open_source(folder, Staging(device))) as source:
        return Loader(source, spec, dtype, device, invariant, memory, on_progress, on_size, share, stage).load()


@dataclass
class Loader:
    """Performs one load. The fields are the arguments of load() and the progress in bytes."""

    source: WeightSource
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    invariant: bool
    memory: InMemory = AS_STORED
    on_progress: Progress = lambda done, total: None
    on_size: Callable[[WeightsSize], None] = lambda size: None
    share: Share | None = None
    stage: Stage | None = None
    # called with each layer that has been read; what it returns is put into Weights
    keep: Callable[[Layer], Layer] = lambda layer: layer
    done: int = 0  # bytes
    total: int = 0  # bytes
    pieces: Pieces = field(default_factory=Pieces)  # the memory of packed linears, on a CPU

    def __post_init__(self) -> None:
        tensors = self.source.tensors
        embed = find_embedding(tensors) or f"model.{EMBED}"  # load() refuses a checkpoint without an embedding
        labels, hidden = self.spec.labels, self.spec.hidden_size
        own_head = CLASSIFIER if labels else HEAD
        self.prefix = embed.removesuffix(EMBED)
        head = find_head(tensors, self.prefix, own_head)
        self.embed = self.source.weight(embed + WEIGHT, (self.spec.vocab_size, hidden))
        tied, size = head is None and self.spec.tied, (labels or self.spec.vocab_size, hidden)
        self.head = None if tied else self.source.weight((head or own_head) + WEIGHT, size)
        self.names = LayerNames.of(self.spec, tensors.names(), self.prefix)
        self.inputs = StoredPerLayerInputs.of(self.spec, self.source, self.prefix, self.dtype)

    def load(self) -> Weights:
        weights = [*self._weights()]
        self.total = check_tensors(self.source, [weight for weight, _ in weights], self.prefix, self._unread())
        self.on_size(WeightsSize(self._needed(weights), self._needed_with_int4()))
        if self.stage is not None:
            weights = [*self._weights(self.stage)]
            self.total = sum(self.source.tensors.nbytes(one.name) for weight, _ in weights for one in weight.tensors())
        self.source.tensors.expect(tensor.name for weight, _ in weights for tensor in weight.tensors())
        self.on_progress(0, self.total)
        if self.stage is not None and self.stage.index:
            return self._without_embedding()
        embed = self._widened(self.embed)
        if self._is_read_from_head and isinstance(embed, BlockRows):
            return self._with_embedding_in_head(embed)
        table = self.as_embedding(embed)
        shared: Part = embed if self.head is None or self.spec.tied else table.stored
        del embed  # frees the quantized codes unless a tied head uses them
        inputs, layers = self._per_layer_inputs(), self._read_layers()
        last = self.norm(self._last_norm())
        return Weights(table, layers, last, self._head(shared), inputs)

    @property
    def _is_read_from_head(self) -> bool:
        """Whether the embedding is in blocks and its codes are read from the head, which is tied and whole."""
        format = self._blocks_of(self.embed)
        return format is not None and format.scales is not None and self.head is None and self.share is None

    def _with_embedding_in_head(self, rows: BlockRows) -> Weights:
        """Packs the head first, so that the rows are not in memory while the layers are read."""
        head = self._head(rows)
        assert head.cpu is not None
        table = in_head(rows, head.cpu, self.dtype)
        del rows
        inputs, layers = self._per_layer_inputs(), self._read_layers()
        return Weights(table, layers, self.norm(self._last_norm()), head, inputs)

    def _without_embedding(self) -> Weights:
        """Reads the weights of a stage behind the first one."""
        table = torch.zeros(1, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        head = pack_stacked([table], dtype=self.dtype, invariant=self.invariant)
        return Weights(plain(table), self._read_layers(), self.norm(self._last_norm()), head)

    def _read_layers(self) -> list[Layer]:
        with kept_free_memory():
            return [self.keep(self.layer(*each)) for each in self._layers(self.stage)]

    def bytes_of_layers(self) -> list[int]:
        """Returns how many bytes each layer takes in memory. Reads no weights."""
        keeper = Keeper(self.dtype, self.device)
        return [keeper.nbytes(self.weights_of_layer(*each)) for each in self._layers()]

    def bytes_of_head(self) -> int:
        """Returns how many bytes the whole output head takes in memory. Reads no weights."""
        head = self._stored_head
        return Keeper(self.dtype, self.device).nbytes([(head, None if self.memory.widen else head.layout)])

    def bytes_of_a_token(self) -> int:
        """Returns how many bytes of weights one decoded token reads, alone in its step. Reads no weights.

        A token reads only those experts of a layer that the router chooses. The embedding is read as the head.
        """
        everything = sum(self.bytes_of_layers()) + self.bytes_of_head()
        if (experts := self.spec.experts) is None:
            return everything
        stacks = (
            (prefix, linears)
            for prefix, layer in self._layers()
            for part in _parts_of(layer)
            for linears in part.stacks(self.spec, layer, self.names).values()
        )
        each = (one for prefix, linears in stacks for linear in linears for one in self.weights_of(linear, prefix))
        of_experts = Keeper(self.dtype, self.device).nbytes(each)
        return everything - of_experts * (experts.count - experts.chosen) // experts.count

    def whole_head(self) -> PackedLinear:
        """Reads the output head alone."""
        return pack_stacked([self._widened(self._stored_head)], dtype=self.dtype, invariant=self.invariant)

    @property
    def _stored_head(self) -> StoredWeight:
        return self.embed if self.head is None else self.head

    def nbytes(self) -> int:
        """Returns how many bytes the model takes in memory. Reads no weights."""
        return self._needed([*self._weights()])

    def layer(self, prefix: str, layer: LayerSpec) -> Layer:
        mixed, fed = (self._made(part, prefix, layer) for part in _parts_of(layer))
        own = {name: self.linear(linear, prefix) for name, linear in own_linears(self.spec).items()}
        norms = {field: self.norm(parts) for field, parts in self.norms_of_layer(prefix, layer).items()}
        per_layer_input = PerLayerInput(**own, norm=self.norm(own_norm(self.spec, prefix))) if own else None
        scales = [self._vector(part) for part in self._scale(prefix)]
        return Layer(
            mixer=mixed, feed_forward=fed, **norms, per_layer_input=per_layer_input, scale=scales[0] if scales else None
        )

    def _made(self, part: StoredPart, prefix: str, layer: LayerSpec) -> Any:
        """Returns the weights of a layer's mixer or feed-forward network. part: how the checkpoint stores it"""
        packed: dict[str, PackedLinear | PackedExperts] = {
            field: one
            for name, linear in part.spelled_linears(self.spec, layer, self.names).items()
            for field, one in self._linears(name, self._own(name, linear, layer), prefix).items()
        }
        small = {
            name: [weight.read(self._tensor, torch.float32 if of.exact else self.dtype) for weight in of.parts]
            for name, of in part.small(self.spec, layer, self.names, prefix).items()
        }
        if self.share is not None:
            small = {
                name: [self.share.small(name, one, self.spec, layer) for one in parts] for name, parts in small.items()
            }
        for name, linears in part.stacks(self.spec, layer, self.names).items():
            packed[name] = self._packed([self._own(name, linear, layer) for linear in linears], prefix)
        unpacked = {
            name: self._unpacked(self._own(name, linear, layer), prefix)
            for name, linear in part.unpacked(self.spec, layer, self.names).items()
        }
        for name, weights in part.derived(self.spec, layer, unpacked).items():
            parts = ([weight] for weight in weights)
            packed[name] = pack_experts(parts, count=len(weights), dtype=self.dtype, invariant=self.invariant)
        return part.make(self.spec, layer, packed, small, torch.empty(0, dtype=self.dtype, device=self.device))

    def _unpacked(self, linear: StackedLinear, prefix: str) -> Tensor:
        """Reads a linear that stays in full precision (StackedLinear.exact): its rows, in memory order."""
        return torch.cat([self._dequantized(part) for part in self._parts(linear, prefix)])

    def _dequantized(self, part: Part) -> Tensor:
        return part if isinstance(part, Tensor) else part.dequantize(self.dtype)

    def _own(self, field: str, linear: StackedLinear, layer: LayerSpec) -> StackedLinear:
        return linear if self.share is None else self.share.cut(field, linear, self.spec, layer)

    def _per_layer_inputs(self) -> PerLayerInputs | None:
        if self.inputs is None:
            return None
        table = self.as_embedding(self._blocks(self.inputs.table) or self.inputs.read_table(self._tensor))
        return PerLayerInputs(table, self.linear(self.inputs.projection, self.prefix), self._vector(self.inputs.norm))

    def _packed(self, experts: Sequence[StackedLinear], prefix: str) -> PackedExperts:
        """Reads and packs one linear of all experts of a layer, expert by expert."""
        biases = [bias for linear in experts if (bias := self._bias(linear, prefix)) is not None]
        bias, count = torch.stack(biases) if biases else None, len(experts)
        layouts = {layout for linear in experts for _, layout in self.weights_of(linear, prefix)}
        parts = (self._parts(linear, prefix) for linear in experts)
        by_row = self.memory.by_row
        if by_row is None or not self.memory.have_rows(layouts):
            return pack_experts(
                parts, bias, count=count, dtype=self.dtype, invariant=self.invariant,
                int8_inputs=self.memory.int8_inputs,
            )  # fmt: skip
        rows = map(self._rows, parts)
        return pack_quantized_experts(
            rows, bias, count=count, dtype=self.dtype, invariant=self.invariant, dynamic=by_row.dynamic
        )

    def _rows(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        rows = self.memory.rows(parts)
        assert rows is not None, "the layout says that there is one scale per row"
        return rows

    def _linears(self, field: str, linear: StackedLinear, prefix: str) -> dict[str, PackedLinear]:
        """Returns a packed linear by its field. Its rows marked `apart` are a second linear, in the field GATES."""
        if not linear.apart:
            return {field: self.linear(linear, prefix)}
        first, *others = self._parts(linear, prefix)
        bias = self._bias(linear, prefix)
        end = linear.first_rows - linear.apart
        own, gates = slice(end), slice(end, linear.first_rows)
        own_bias = None if bias is None else torch.cat((bias[own], bias[linear.first_rows :]))
        of_gates = linear.apart * linear.rows[0] // linear.first_rows
        return {
            field: self._pack([_rows_of(first, own), *others], own_bias, sum(linear.rows) - of_gates),
            GATES: self._pack([_rows_of(first, gates)], None if bias is None else bias[gates].contiguous(), of_gates),
        }

    def linear(self, linear: StackedLinear, prefix: str) -> PackedLinear:
        return self._pack(self._parts(linear, prefix), self._bias(linear, prefix), sum(linear.rows))

    def _pack(self, parts: Sequence[Part], bias: Tensor | None, whole_rows: int) -> PackedLinear:
        """whole_rows: the rows of the weight in the checkpoint, of which a rank has only some."""
        by_row, rows = self.memory.by_row, self.memory.rows(parts)
        if by_row is None or rows is None:
            packed = pack_stacked(
                parts, bias, dtype=self.dtype, invariant=self.invariant, memory=self.pieces.take,
                int8_inputs=self.memory.int8_inputs,
            )  # fmt: skip
        else:
            packed = pack_quantized(
                *rows, bias, dtype=self.dtype, invariant=self.invariant, dynamic=by_row.dynamic,
                memory=self.pieces.take,
            )  # fmt: skip
        return packed if self.share is None else replace(packed, whole_rows=whole_rows)

    def _parts(self, linear: StackedLinear, prefix: str) -> list[Part]:
        orders, stored = linear.orders(self.device), [self.source.weight(*weight) for weight in linear.weights(prefix)]
        return [self._part(*each, exact=linear.exact) for each in zip(stored, orders, strict=True)]

    def _part(self, weight: StoredWeight, order: Tensor | slice, *, exact: bool) -> Part:
        if exact:
            return self._dequantized(self.read(weight))[order]
        if (blocks := self._blocks(weight)) is not None:
            return blocks.rows(order)
        part = self.memory.convert(self.read(weight), self.dtype)
        if isinstance(part, Tensor):
            return part[order]
        check_finite(part.scale, weight.name, self.source.tensors)
        return part.rows(order)

    def _blocks(self, weight: StoredWeight) -> BlockRows | None:
        """Reads a weight in the blocks of the file; None, and nothing is read, if it cannot stay so."""
        format = self._blocks_of(weight)
        if format is None:
            return None
        rows, columns = weight.shape
        stored = BlockRows(self._tensor(weight.name, (rows, format.row_bytes(columns)), torch.uint8), format)
        return check_finite_blocks(stored, weight.name, self.source.tensors)

    def _blocks_of(self, weight: StoredWeight) -> BlockFormat | None:
        """Returns the format of the blocks in which a weight stays: until the C library packs it, or for good."""
        layout = self.memory.layout(weight)
        format = None if layout is None or self.memory.by_row else layout.blocks
        in_c = Keeper(self.dtype, self.device).in_c and format is not None and format.is_unpacked_in_c
        return format if in_c else None

    def as_embedding(self, part: Part) -> Embedding:
        """Returns a table of which rows are read. It shares the memory of a part that is in blocks or not quantized."""
        if isinstance(part, BlockRows):
            return Embedding(part.stored, self.dtype, part.format)
        return plain(self._dequantized(part))

    def _bias(self, linear: StackedLinear, prefix: str) -> Tensor | None:
        stored = zip(linear.biases(prefix), linear.orders(self.device), strict=False)
        biases = [self._vector(bias)[order] for bias, order in stored]
        return torch.cat(biases) if biases else None

    def _head(self, embed: Part) -> PackedLinear:
        """Packs the head.

        A checkpoint with tied embeddings may hold a head nevertheless. A head that differs from the embedding is used.
        """
        head = embed if self.head is None else self._widened(self.head)
        if self.spec.tied and isinstance(head, Tensor) and isinstance(embed, Tensor) and torch.equal(head, embed):
            head = embed
        whole_rows = 0
        if self.share is not None:
            whole_rows = head.shape[0]
            head = _rows_of(head, self.share.head(whole_rows))
        packed = pack_stacked([head], dtype=self.dtype, invariant=self.invariant, memory=self.pieces.take)
        return replace(packed, whole_rows=whole_rows)

    def _widened(self, weight: StoredWeight) -> Part:
        """Reads the embedding or the head, dequantized if all linears are to be widened."""
        if (blocks := self._blocks(weight)) is not None:
            return blocks
        read = self.read(weight)
        return read.dequantize(self.dtype) if self.memory.widen and isinstance(read, QuantizedWeight) else read

    def read(self, weight: StoredWeight) -> Tensor | QuantizedWeight:
        return weight.read(self._tensor, self.dtype)

    def _vector(self, norm: PlainWeight) -> Tensor:
        return norm.read(self._tensor, self.dtype)

    def _tensor(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        into = torch.empty(shape, dtype=dtype, device=self.device)
        self.source.tensors.copy(name, into)
        check_read(into, name, self.source.tensors)
        self.done += self.source.tensors.nbytes(name)
        self.on_progress(self.done, self.total)
        return into

    def _needed(self, weights: Iterable[Kept]) -> int:
        """Returns how many bytes these weights take in memory."""
        keeper, layout = Keeper(self.dtype, self.device), None if self.memory.widen else self.embed.layout
        head = [(self.embed, layout)] if self.head is None and keeper.copies_head(layout) else []
        return keeper.nbytes([*weights, *head]) - self.spared - (0 if self.inputs is None else self.inputs.spared)

    @property
    def spared(self) -> int:
        """How many bytes are saved because tables stay in the blocks of the file."""
        tables = [self.embed] if self.inputs is None else [self.embed, self.inputs.table]
        return sum(self._spared_of(table, in_head=table is self.embed and self._is_read_from_head) for table in tables)

    def _spared_of(self, table: StoredWeight, *, in_head: bool) -> int:
        format, (rows, columns) = self._blocks_of(table), table.shape
        if format is None:
            return 0
        kept = format.row_bytes(columns)
        if in_head and format.scales is not None:
            kept = columns // format.numbers * (format.scales.stop - format.scales.start)
        return rows * (columns * self.dtype.itemsize - kept)

    def _needed_with_int4(self) -> int | None:
        """Returns how many bytes the model would take with --quantization int4; None if it is quantized already."""
        if self.spec.stored is not None or self.memory.kind:
            return None
        quantized = replace(self, memory=in_memory(None, "int4", self.device))
        return quantized._needed(quantized._weights())

    def _weights(self, stage: Stage | None = None) -> Iterator[Kept]:
        """Yields the weights of a stage, in the order of reading. If `stage` is None, these are all weights."""
        first = stage is None or not stage.index
        if first:
            yield self.embed, None
        if self.inputs is not None and first:
            yield self.inputs.table, None
            yield from self.weights_of(self.inputs.projection, self.prefix)
            yield self.inputs.norm, None
        for prefix, layer in self._layers(stage):
            yield from self.weights_of_layer(prefix, layer)
        yield from _in_full(self._last_norm())
        if self.head is not None and first:
            yield self.head, None if self.memory.widen else self.head.layout

    def weights_of_layer(self, prefix: str, layer: LayerSpec) -> Iterator[Kept]:
        for part in _parts_of(layer):
            yield from self._weights_of_part(part, prefix, layer)
        for linear in own_linears(self.spec).values():
            yield from self.weights_of(linear, prefix)
        for parts in self.norms_of_layer(prefix, layer).values():
            yield from _in_full(parts)
        yield from _in_full((*own_norm(self.spec, prefix), *self._scale(prefix)))

    def norms_of_layer(self, prefix: str, layer: LayerSpec) -> dict[str, Sequence[PlainWeight]]:
        """Returns the stored tensors of a layer's norms, by field of Layer. prefix: of the layer's tensor names"""
        return layer_norms(self.spec, layer, prefix, self.names)

    def _weights_of_part(self, part: StoredPart, prefix: str, layer: LayerSpec) -> Iterator[Kept]:
        for linear in part.spelled_linears(self.spec, layer, self.names).values():
            yield from self.weights_of(linear, prefix)
            yield from _in_full(linear.biases(prefix))
        for of in part.small(self.spec, layer, self.names, prefix).values():
            yield from _in_full(of.parts)
        for linear in part.unpacked(self.spec, layer, self.names).values():
            yield from self.weights_of(linear, prefix)
        for linears in part.stacks(self.spec, layer, self.names).values():
            yield from _in_full(bias for linear in linears for bias in linear.biases(prefix))
            for linear in linears:
                yield from self.weights_of(linear, prefix)

    def weights_of(self, linear: StackedLinear, prefix: str) -> Iterator[Kept]:
        for name in linear.weights(prefix):
            weight = self.source.weight(*name)
            yield weight, None if linear.exact else self.memory.layout(weight)

    def _layers(self, stage: Stage | None = None) -> Iterator[tuple[str, LayerSpec]]:
        """Yields for each layer of a stage, by default for each layer of the model, the prefix of its tensor names, and
        its spec.
        """
        numbers = range(len(self.spec.layers)) if stage is None else range(stage.first, stage.end)
        yield from ((f"{self.prefix}layers.{i}.", self.spec.layers[i]) for i in numbers)

    def _unread(self) -> tuple[str, ...]:
        """Returns name prefixes of tensors that the checkpoint may have although no layer reads them."""
        both = ((prefix, layer, part) for prefix, layer in self._layers() for part in _parts_of(layer))
        unused = [prefix + module for prefix, layer, part in both for module in part.unread(layer)]
        count = len(self.spec.layers)
        drafters = [f"{self.prefix}layers.{count + i}." for i in range(self.spec.draft_layers)]
        return (*unused, *drafters, *((f"{self.prefix}mtp_",) if drafters else ()))  # mtp_block and so on: ERNIE 4.5

    def _last_norm(self) -> Sequence[PlainWeight]:
        return norm_weights(self.spec, self.prefix + self.names.spelled(NORM), self.spec.hidden_size)

    def _scale(self, prefix: str) -> Sequence[PlainWeight]:
        return [PlainWeight(f"{prefix}layer_scalar", (1,))] if self.spec.layer_scales else []

    def norm(self, parts: Sequence[PlainWeight]) -> Tensor:
        return norm(self.spec, [self._vector(part) for part in parts])


def _parts_of(layer: LayerSpec) -> tuple[StoredPart, StoredPart]:
    return mixer(layer.mixer).stored, feed_forward(layer.feed_forward).stored


def _in_full(weights: Iterable[StoredWeight]) -> Iterator[Kept]:
    yield from ((weight, None) for weight in weights)


def _rows_of(part: Part, rows: slice) -> Part:
    return part[rows].contiguous() if isinstance(part, Tensor) else part.rows(rows)


# Predicts how many bytes weights take in memory.


@dataclass(frozen=True, slots=True)
class Keeper:
    """Knows how weights are kept on a device by a model that computes in `dtype`."""

    dtype: torch.dtype
    device: torch.device

    def nbytes(self, kept: Iterable[tuple[StoredWeight, Layout | None]]) -> int:
        """Returns the size of weights in bytes, without padding. A weight whose layout is None is in full precision."""
        return sum(self.nbytes_as(weight.shape, layout) for weight, layout in kept)

    def copies_head(self, layout: Layout | None) -> bool:
        """Returns whether a tied head with this layout is kept in memory in addition to the embedding."""
        return layout is not None or self.in_c

    def nbytes_as(self, shape: Shape, layout: Layout | None) -> int:
        """Returns the size in bytes of a weight with this shape. layout: None if the weight is in full precision"""
        plain = torch.Size(shape).numel() * self.dtype.itemsize
        # On a CPU without the C library, weights are dequantized: plain PyTorch has no products of quantized codes.
        if layout is None or (self.device.type == "cpu" and not self.in_c):
            return plain
        short = self.in_c and self.dtype == torch.bfloat16
        return layout.nbytes(shape, scale_bytes=2 if short else 4, narrow=short and c_library.tier() != "amx")

    @property
    def in_c(self) -> bool:
        """Whether the C library computes the model."""
        return self.device.type == "cpu" and c_library.available(self.dtype)


# Opens a checkpoint of any file format as a WeightSource (see worker/checkpoint/stored_weight.py).

# Tensors whose names end like this are not read: rotary tables in old checkpoints, and scales of quantized activations.
IGNORED = ("rotary_emb.inv_freq",)
OF_ACTIVATIONS = (
    ".input_scale", ".input_global_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip


def open_source(folder: Path, staging: Staging | None) -> WeightSource:
    """Opens the checkpoint. staging: reads the tensors; closed by the returned source's close(); None: no staging

    Raises CheckpointError when a file is broken or the quantization is not supported.
    """
    config = read_config(folder)
    method = method_of(config)
    if (folder / GGUF_INDEX).exists():
        from worker.quantization.gguf_tensors import GgufTensors

        return FileSource(GgufTensors(folder, staging), method)
    checkpoint = Checkpoint(folder, staging)
    if config.get("model_type") == single_blocks.MODEL_TYPE:
        return FileSource(single_blocks.as_layers(checkpoint, config), method)
    return FileSource(checkpoint, method)


class OpenTensors(StoredTensors, Protocol):
    """The tensors of open files."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A checkpoint in safetensors or GGUF files. method: how config.json says that weights are quantized; None: they
    are not quantized
    """

    tensors: OpenTensors
    method: Method | None

    @property
    def ignored(self) -> tuple[str, ...]:
        return IGNORED if self.method is None else (*IGNORED, *OF_ACTIVATIONS, *self.method.ignored)

    def weight(self, name: str, shape: Shape, transposed: bool | None = False) -> StoredWeight:
        low_bit = None if self.method is None else self.method.weight(name, shape, self.tensors)
        if low_bit is not None:
            return low_bit
        if transposed is None:
            transposed = shape == shape[::-1] or name not in self.tensors or self.tensors.shape(name) != shape
        return PlainWeight(name, shape, transposed)

    def close(self) -> None:
        self.tensors.close()

"""Fills the weights of a decoder from a checkpoint, layer by layer, so that at most one linear is in memory twice.

The spec determines which weights a checkpoint must hold, and the checkpoint says how it stores each (stored_weight.py).
Names, shapes and formats are checked before any weight is read. Projections with the same input are stacked into one
linear; each may be stored in a format of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.kernels.linear import PackedLinear, pack_quantized, pack_stacked
from worker.kernels.quantized_weight import QuantizedWeight
from worker.model.checkpoint import CheckpointError
from worker.model.decoder import Layer, Weights
from worker.model.quantization.codes import check_finite
from worker.model.quantization.in_memory import AS_STORED, InMemory
from worker.model.source import open_source
from worker.model.spec import ModelSpec
from worker.model.staging import Staging
from worker.model.stored_weight import Layout, PlainWeight, Shape, StoredTensors, StoredWeight, WeightSource

EMBED, HEAD, NORM = "embed_tokens", "lm_head", "norm"
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Describes linears of the checkpoint whose rows are concatenated into one linear."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool
    order: Tensor | None = None  # the row order in memory, None if it is that of the checkpoint; moves stay in a module

    def orders(self, device: torch.device) -> list[Tensor | slice]:
        """Returns an index for each module that selects its rows in the order in memory."""
        if self.order is None:
            return [slice(None)] * len(self.modules)
        starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        parts = self.order.to(device).split_with_sizes(self.rows)
        return [part - start for part, start in zip(parts, starts, strict=True)]

    def weights(self, prefix: str) -> list[tuple[str, Shape]]:
        """Returns the names and shapes of the weights in the checkpoint."""
        parts = zip(self.modules, self.rows, strict=True)
        return [(f"{prefix}{module}{WEIGHT}", (rows, self.columns)) for module, rows in parts]

    def biases(self, prefix: str) -> list[PlainWeight]:
        parts = zip(self.modules, self.rows, strict=True)
        return [PlainWeight(f"{prefix}{module}.bias", (rows,)) for module, rows in parts] if self.bias else []


def load(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
    memory: InMemory = AS_STORED,
    on_progress: Progress = lambda done, total: None,
    on_size: Callable[[int], None] = lambda needed: None,
) -> Weights:
    """Loads all weights to `device`, with packed linears. Weights in full precision become `dtype`.

    invariant: see kernels/linear.py.
    memory: how the linears of the layers are kept. Embedding and head are never quantized here: the head decides
        between tokens with close logits, and a tied head is the embedding, whose rows are looked up. A head that the
        checkpoint has in few bits keeps them unless all linears are widened; an embedding is always widened.
    on_progress: called with (done, total) bytes of the checkpoint, from (0, total) to (total, total).
    on_size: called before on_progress with the bytes that the device must hold; it may raise to end the load.

    Raises CheckpointError when a tensor is missing, superfluous, misshaped or impossible, or a file is broken.
    """
    with closing(open_source(folder, Staging(device))) as source:
        return Loader(source, spec, dtype, device, invariant, memory, on_progress, on_size).load()


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
    on_size: Callable[[int], None] = lambda needed: None
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        tensors = self.source.tensors
        embed = _named(tensors, EMBED)
        if embed is None:
            raise CheckpointError(f"{tensors.folder}: tensor model.{EMBED}{WEIGHT} is missing")
        self.prefix, head = embed.removesuffix(EMBED), _named(tensors, HEAD)
        size = (self.spec.vocab_size, self.spec.hidden_size)
        self.embed = self.source.weight(embed + WEIGHT, size)
        tied = head is None and self.spec.tied
        self.head = None if tied else self.source.weight((head or HEAD) + WEIGHT, size)

    def load(self) -> Weights:
        self._check()
        self.on_size(self._needed())
        self.source.tensors.expect(tensor.name for weight in self._stored() for tensor in weight.tensors())
        self.on_progress(0, self.total)
        embed = self._widened(self.embed)
        table = embed.dequantize(self.dtype) if isinstance(embed, QuantizedWeight) else embed
        shared = embed if self.head is None or self.spec.tied else table
        del embed  # its codes are needed no more unless the head is tied
        layers = [self._layer(prefix) for prefix in self._prefixes()]
        return Weights(table, layers, self._vector(self._norm()), self._head(shared))

    def _layer(self, prefix: str) -> Layer:
        linears = {name: self._linear(linear, prefix) for name, linear in _stacked_linears(self.spec).items()}
        norms = {name: self._vector(norm) for name, norm in _norms(self.spec, prefix).items()}
        return Layer(**linears, **norms)  # type: ignore[arg-type]  # the tables' keys are the fields of Layer

    def _linear(self, linear: StackedLinear, prefix: str) -> PackedLinear:
        orders, stored = linear.orders(self.device), [self.source.weight(*w) for w in linear.weights(prefix)]
        parts = [self._ordered(weight, order) for weight, order in zip(stored, orders, strict=True)]
        biases = [self._vector(b)[order] for b, order in zip(linear.biases(prefix), orders, strict=False)]
        bias = torch.cat(biases) if biases else None
        by_row, rows = self.memory.by_row, self.memory.rows(parts)
        if by_row is None or rows is None:
            return pack_stacked(parts, bias, dtype=self.dtype, invariant=self.invariant)
        return pack_quantized(*rows, bias, dtype=self.dtype, invariant=self.invariant, dynamic=by_row.dynamic)

    def _ordered(self, weight: StoredWeight, order: Tensor | slice) -> Tensor | QuantizedWeight:
        part = self.memory.convert(self._read(weight), self.dtype)
        if isinstance(part, Tensor):
            return part[order]
        check_finite(part.scale, weight.name, self.source.tensors)
        return part.rows(order)

    def _head(self, embed: Tensor | QuantizedWeight) -> PackedLinear:
        """Packs the head.

        A tied checkpoint may hold a head nevertheless. If that is not a copy of the embedding, it is used.
        """
        head = embed if self.head is None else self._widened(self.head)
        if self.spec.tied and isinstance(head, Tensor) and isinstance(embed, Tensor) and torch.equal(head, embed):
            head = embed
        return pack_stacked([head], dtype=self.dtype, invariant=self.invariant)

    def _widened(self, weight: StoredWeight) -> Tensor | QuantizedWeight:
        """Reads the embedding or the head."""
        read = self._read(weight)
        return read.dequantize(self.dtype) if self.memory.widen and isinstance(read, QuantizedWeight) else read

    def _read(self, weight: StoredWeight) -> Tensor | QuantizedWeight:
        return weight.read(self._tensor, self.dtype)

    def _vector(self, norm: PlainWeight) -> Tensor:
        return norm.read(self._tensor, self.dtype)

    def _tensor(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        into = torch.empty(shape, dtype=dtype, device=self.device)
        self.source.tensors.copy(name, into)
        self.done += self.source.tensors.nbytes(name)
        self.on_progress(self.done, self.total)
        return into

    def _check(self) -> None:
        """Checks names, shapes and formats of the tensors, without reading a weight."""
        tensors = self.source.tensors
        expected = {tensor.name: tensor for weight in self._stored() for tensor in weight.tensors()}
        for name, tensor in expected.items():
            if name not in tensors:
                raise CheckpointError(f"{tensors.folder}: tensor {name} is missing")
            if tensors.shape(name) != tensor.shape:
                raise CheckpointError(
                    f"{tensors.where(name)}: tensor {name} has shape {list(tensors.shape(name))}; "
                    f"by the model's config it is {list(tensor.shape)}"
                )
            if (stored := tensors.format(name)) not in tensor.formats:
                raise CheckpointError(
                    f"{tensors.where(name)}: tensor {name} is stored as {stored}; "
                    f"supported are {', '.join(tensor.formats)}"
                )
        for name in sorted(set(tensors.names()) - expected.keys()):
            if name.startswith(self.prefix) and not name.endswith(self.source.ignored):
                raise CheckpointError(f"{tensors.where(name)}: tensor {name} does not belong to this model")
        self.total = sum(tensors.nbytes(name) for name in expected)

    def _needed(self) -> int:
        """Returns how many bytes all weights take in memory. A tied head in few bits is a copy of the embedding."""
        size = sum(self._kept_size(weight, self.memory.layout(weight)) for weight in self._linears())
        vectors = (vector for prefix in self._prefixes() for vector in self._vectors(prefix))
        size += sum(self._kept_size(vector, None) for vector in (self.embed, *vectors, self._norm()))
        head = self.embed if self.head is None else self.head
        layout = None if self.memory.widen else head.layout
        shared = self.head is None and layout is None
        return size if shared else size + self._kept_size(head, layout)

    def _kept_size(self, weight: StoredWeight, layout: Layout | None) -> int:
        full = torch.Size(weight.shape).numel() * self.dtype.itemsize
        return full if layout is None else layout.nbytes(weight.shape)

    def _stored(self) -> Iterator[StoredWeight]:
        """Yields all weights that the checkpoint must hold, in the order in which they are read."""
        yield self.embed
        for prefix in self._prefixes():
            for linear in _stacked_linears(self.spec).values():
                yield from (self.source.weight(*weight) for weight in linear.weights(prefix))
                yield from linear.biases(prefix)
            yield from _norms(self.spec, prefix).values()
        yield self._norm()
        if self.head is not None:
            yield self.head

    def _linears(self) -> Iterator[StoredWeight]:
        """Yields the weights of all linears of the layers."""
        for prefix, linear in product(self._prefixes(), _stacked_linears(self.spec).values()):
            yield from (self.source.weight(*weight) for weight in linear.weights(prefix))

    def _vectors(self, prefix: str) -> Iterator[PlainWeight]:
        """Yields the biases and norms of a layer."""
        yield from (bias for linear in _stacked_linears(self.spec).values() for bias in linear.biases(prefix))
        yield from _norms(self.spec, prefix).values()

    def _prefixes(self) -> list[str]:
        """Returns what the names of each layer's tensors begin with."""
        return [f"{self.prefix}layers.{i}." for i in range(len(self.spec.layers))]

    def _norm(self) -> PlainWeight:
        return PlainWeight(self.prefix + NORM + WEIGHT, (self.spec.hidden_size,))


def _named(tensors: StoredTensors, module: str) -> str | None:
    """Returns the full name of the module with a weight, `language_model.lm_head`; None if there is none."""
    found = []
    for name in tensors.names():
        path, _, kind = name.rpartition(".")
        if (path == module or path.endswith("." + module)) and kind.startswith(("weight", "qweight")):
            found.append(path)
    return min(found, key=len, default=None)


def _stacked_linears(spec: ModelSpec) -> dict[str, StackedLinear]:
    """Returns the linears of a Layer, by field name."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    order = _row_order(spec)
    if spec.fused:
        qkv = StackedLinear(("self_attn.qkv_proj",), (q + 2 * kv,), hidden, spec.qkv_bias, order)
        gate_up = StackedLinear(("mlp.gate_up_proj",), (2 * inner,), hidden, spec.mlp_bias)
    else:
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv = StackedLinear(attention, (q, kv, kv), hidden, spec.qkv_bias, order)
        gate_up = StackedLinear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, spec.mlp_bias)
    return {
        "qkv": qkv,
        "o": StackedLinear(("self_attn.o_proj",), (hidden,), q, spec.o_bias),
        "gate_up": gate_up,
        "down": StackedLinear(("mlp.down_proj",), (hidden,), inner, spec.mlp_bias),
    }


def _row_order(spec: ModelSpec) -> Tensor | None:
    """Returns the row order of queries, keys and values if only a part of each head is rotated, else None.

    The kernels rotate dimension i of a head together with dimension i + D / 2. The checkpoint rotates only the first R
    of the D dimensions, and pairs i with i + R / 2. The new order places these pairs D / 2 apart and fills the gaps
    with the other dimensions.
    """
    rotated, size = spec.ropes[0].rotated, spec.head_dim
    if not rotated:
        return None
    half, gap = rotated // 2, (size - rotated) // 2
    first, second, rest = torch.arange(size).split_with_sizes((half, half, size - rotated))
    head = torch.cat((first, rest[:gap], second, rest[gap:]))
    heads = spec.heads + spec.kv_heads
    moved = (torch.arange(heads)[:, None] * size + head).flatten()
    return torch.cat((moved, torch.arange(heads * size, spec.qkv_size)))


def _norms(spec: ModelSpec, prefix: str) -> dict[str, PlainWeight]:
    """Returns the norms of a Layer, by field name.

    The module `post_attention_layernorm` is one of two different norms: see its two rows.
    """
    norms = {"before_attention": ("input_layernorm", spec.hidden_size)}
    if spec.sandwich_norms:
        norms["after_attention"] = ("post_attention_layernorm", spec.hidden_size)
        norms["before_mlp"] = ("pre_feedforward_layernorm", spec.hidden_size)
        norms["after_mlp"] = ("post_feedforward_layernorm", spec.hidden_size)
    else:
        norms["before_mlp"] = ("post_attention_layernorm", spec.hidden_size)
    if spec.qk_norm:
        norms["q_norm"] = ("self_attn.q_norm", spec.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", spec.head_dim)
    return {name: PlainWeight(f"{prefix}{module}{WEIGHT}", (size,)) for name, (module, size) in norms.items()}

"""Fills the weights of a decoder from a checkpoint, layer by layer, so that at most one linear is in memory twice.

The spec determines which tensors a checkpoint must hold. This is checked before any weight is read. Projections with
the same input are stacked into one linear. A "stored weight" is one weight as the checkpoint stores it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.kernels.linear import PackedLinear, pack, pack_quantized
from worker.kernels.quantize import Kind, Scheme, dequantize, quantize
from worker.model import quantization
from worker.model.checkpoint import Checkpoint, CheckpointError
from worker.model.decoder import Layer, Weights
from worker.model.quantization import ExpectedTensor, WeightSource, expand_scales, source_of, stack_rows, unpack_int32
from worker.model.spec import ModelSpec
from worker.model.staging import Staging

EMBED, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
IGNORED = ("rotary_emb.inv_freq",)  # rotary tables in old checkpoints, not needed

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Describes linears of the checkpoint whose rows are concatenated into one linear."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool
    order: Tensor | None = None  # the row order in memory; None if it is that of the checkpoint

    def ordered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors, which have one entry per row, with their entries in `order`."""
        return tensors if self.order is None else tuple(tensor[self.order.to(tensor.device)] for tensor in tensors)

    def tensors(self, prefix: str, kind: str) -> list[tuple[str, Shape]]:
        """Returns the names and shapes of the tensors in the checkpoint. kind: `weight` or `bias`."""
        columns = (self.columns,) if kind == "weight" else ()
        parts = zip(self.modules, self.rows, strict=True)
        return [(f"{prefix}{module}.{kind}", (rows, *columns)) for module, rows in parts]


def load(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
    scheme: Scheme | None = None,
    on_progress: Progress = lambda done, total: None,
    on_size: Callable[[int], None] = lambda needed: None,
) -> Weights:
    """Loads all weights to `device` as `dtype`, with packed linears.

    invariant: see kernels/linear.py.
    scheme: how the linears of the layers are quantized in memory. Linears that the checkpoint stores in this format
        with one scale per row keep their values. If the checkpoint has quantized only some linears, the others become
        `dtype`. If scheme is None, all linears become `dtype`. Embedding and head are never quantized: the head decides
        between tokens with close logits, and a tied head is the embedding, whose rows are looked up.
    on_progress: called with (done, total) bytes of the checkpoint, from (0, total) to (total, total).
    on_size: called before on_progress with the bytes that the device must hold; it may raise to end the load.

    Raises CheckpointError when a tensor is missing, superfluous or misshaped, or a file is broken.
    """
    staging = Staging(device) if device.type == "cuda" else None
    with closing(Checkpoint(folder, staging)) as checkpoint:
        return _Loader(checkpoint, spec, dtype, device, invariant, scheme, on_progress, on_size).load()


@dataclass
class _Loader:
    """Performs one load. The fields are the arguments of load() and the progress in bytes."""

    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    invariant: bool
    scheme: Scheme | None
    on_progress: Progress
    on_size: Callable[[int], None]
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.prefix, self.head = _prefix(self.checkpoint), _named(self.checkpoint, HEAD)

    def load(self) -> Weights:
        self._check()
        self.on_size(self._needed())
        self.checkpoint.expect(tensor.name for tensor in self._expected())
        self.on_progress(0, self.total)
        hidden, vocab = self.spec.hidden_size, self.spec.vocab_size
        embed = self._read([(self.prefix + EMBED, (vocab, hidden))])
        return Weights(
            embed=embed,
            layers=[self._layer(f"{self.prefix}layers.{i}.") for i in range(len(self.spec.layers))],
            norm=self._read([(self.prefix + NORM, (hidden,))]),
            head=pack(self._head_weight(embed), invariant=self.invariant),
        )

    def _layer(self, prefix: str) -> Layer:
        linears = {name: self._linear(linear, prefix) for name, linear in _stacked_linears(self.spec).items()}
        norms = {
            name: self._read([(f"{prefix}{module}.weight", (size,))])
            for name, (module, size) in _norms(self.spec).items()
        }
        return Layer(**linears, **norms)  # type: ignore[arg-type]  # the tables' keys are the fields of Layer

    def _linear(self, linear: StackedLinear, prefix: str) -> PackedLinear:
        sources = [self._source(*tensor) for tensor in linear.tensors(prefix, "weight")]
        if self.scheme is None or not self._is_quantized(sources):
            (weight,) = linear.ordered(self._weight(sources))
            return pack(weight, self._bias(linear, prefix), invariant=self.invariant)
        values, scales = linear.ordered(*self._quantized(sources, self.scheme.kind))
        return pack_quantized(
            values, scales, self._bias(linear, prefix), dtype=self.dtype, invariant=self.invariant,
            dynamic=self.scheme.dynamic,
        )  # fmt: skip

    def _bias(self, linear: StackedLinear, prefix: str) -> Tensor | None:
        return linear.ordered(self._read(linear.tensors(prefix, "bias")))[0] if linear.bias else None

    def _is_quantized(self, sources: Sequence[WeightSource]) -> bool:
        """Whether the linear layer made of these stored weights has eight bits in memory.

        This needs a scheme. If the checkpoint is quantized, it must also store all of these weights in eight bits; if
        it is not, all linears are quantized when they are loaded.
        """
        return self.scheme is not None and (
            self.spec.stored is None or all(source.stored is not None for source in sources)
        )

    def _quantized(self, sources: Sequence[WeightSource], kind: Kind) -> tuple[Tensor, Tensor]:
        """Returns the values [N, K] and scales [N] of a quantized linear made of these stored weights."""
        stored = self.spec.stored
        if stored is None or not stored.by_row or stored.kind != kind:
            return quantize(self._weight(sources), kind)
        values, scales = zip(*map(self._eight_bits, sources), strict=True)
        return stack_rows(values), torch.cat(scales)

    def _source(self, name: str, shape: Shape) -> WeightSource:
        return source_of(name, shape, self.spec.stored, self.checkpoint)

    def _weight(self, sources: Sequence[WeightSource]) -> Tensor:
        """Returns the stored weights stacked into one weight [N, K] of the model's dtype, dequantized if necessary."""
        if all(source.stored is None for source in sources):
            return self._read([(source.name, source.shape) for source in sources])
        return torch.cat([self._full(source) for source in sources])

    def _full(self, source: WeightSource) -> Tensor:
        if source.stored is None:
            return self._read([(source.name, source.shape)])
        return dequantize(*self._eight_bits(source), self.dtype)

    def _eight_bits(self, source: WeightSource) -> tuple[Tensor, Tensor]:
        """Reads the values [N, K] and the scales, [N] or [N, K], of a quantized stored weight."""
        values = self._read([(source.name, source.values_shape)], source.values_dtype)
        scale = self._read([(source.scale, source.scale_shape or (1,))], torch.float32)
        return (unpack_int32(values, source.shape[1]) if source.packed else values), expand_scales(scale, source)

    def _head_weight(self, embed: Tensor) -> Tensor:
        """Returns the weight of the head.

        A tied checkpoint may hold a head nevertheless. If that is not a copy of the embedding, it is used.
        """
        if not self.head:
            return embed
        head = self._full(self._head_source())
        return embed if self.spec.tied and torch.equal(head, embed) else head

    def _head_source(self) -> WeightSource:
        return self._source(self.head or HEAD, (self.spec.vocab_size, self.spec.hidden_size))

    def _read(self, tensors: list[tuple[str, Shape]], dtype: torch.dtype | None = None) -> Tensor:
        rows = [shape[0] for _, shape in tensors]
        whole = torch.empty((sum(rows), *tensors[0][1][1:]), dtype=dtype or self.dtype, device=self.device)
        for (name, _), part in zip(tensors, whole.split_with_sizes(rows), strict=True):
            self.checkpoint.copy(name, part)
            self.done += self.checkpoint.nbytes(name)
            self.on_progress(self.done, self.total)
        return whole

    def _check(self) -> None:
        """Checks names, shapes and formats of the tensors, without reading a weight."""
        checkpoint, expected = self.checkpoint, {tensor.name: tensor for tensor in self._expected()}
        for name, tensor in expected.items():
            if name not in checkpoint:
                raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing")
            if checkpoint.shape(name) != tensor.shape:
                raise CheckpointError(
                    f"{checkpoint.where(name)}: tensor {name} has shape {list(checkpoint.shape(name))}; "
                    f"by config.json it is {list(tensor.shape)}"
                )
            checkpoint.dtype(name, tensor.formats)
        ignored = IGNORED if self.spec.stored is None else IGNORED + quantization.IGNORED
        for name in sorted(set(checkpoint.names()) - expected.keys()):
            if name.startswith(self.prefix) and not name.endswith(ignored):
                raise CheckpointError(f"{checkpoint.where(name)}: tensor {name} does not belong to this model")
        self.total = sum(checkpoint.nbytes(name) for name in expected)

    def _needed(self) -> int:
        """Returns how many bytes all weights take in memory, without scales."""
        numbers = sum(torch.Size(tensor.becomes or tensor.shape).numel() for tensor in self._expected())
        quantized = (source for sources in self._linears() if self._is_quantized(sources) for source in sources)
        eight_bits = sum(torch.Size(source.shape).numel() for source in quantized)
        return numbers * self.dtype.itemsize - eight_bits * (self.dtype.itemsize - 1)

    def _linears(self) -> Iterator[list[WeightSource]]:
        """Yields the stored weights of each linear, for all layers."""
        for i, linear in product(range(len(self.spec.layers)), _stacked_linears(self.spec).values()):
            yield [self._source(*weight) for weight in linear.tensors(f"{self.prefix}layers.{i}.", "weight")]

    def _expected(self) -> Iterator[ExpectedTensor]:
        """Yields all tensors that the checkpoint must hold, in the order in which they are read."""
        hidden, vocab = self.spec.hidden_size, self.spec.vocab_size
        yield ExpectedTensor(self.prefix + EMBED, (vocab, hidden))
        for i in range(len(self.spec.layers)):
            yield from self._layer_tensors(f"{self.prefix}layers.{i}.")
        yield ExpectedTensor(self.prefix + NORM, (hidden,))
        if self.head or not self.spec.tied:
            yield from self._head_source().tensors()

    def _layer_tensors(self, prefix: str) -> Iterator[ExpectedTensor]:
        for linear in _stacked_linears(self.spec).values():
            for weight in linear.tensors(prefix, "weight"):
                yield from self._source(*weight).tensors()
            for bias in linear.tensors(prefix, "bias") if linear.bias else ():
                yield ExpectedTensor(*bias)
        for module, size in _norms(self.spec).values():
            yield ExpectedTensor(f"{prefix}{module}.weight", (size,))


def _prefix(checkpoint: Checkpoint) -> str:
    """Returns the prefix of the names of the text model's tensors: `model.`, `language_model.model.`, … or ""."""
    name = _named(checkpoint, EMBED)
    if not name:
        raise CheckpointError(f"{checkpoint.folder}: tensor model.{EMBED} is missing")
    return name.removesuffix(EMBED)


def _named(checkpoint: Checkpoint, ending: str) -> str:
    names = (name for name in checkpoint.names() if name == ending or name.endswith("." + ending))
    return min(names, key=len, default="")


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


def _norms(spec: ModelSpec) -> dict[str, tuple[str, int]]:
    """Returns the norms of a Layer, by field name: the module in the checkpoint, and the size.

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
    return norms

"""The encoder: one plain loop over the layers, for whole texts that lie one after another in the rows of a step.

Every row of a linear or a norm depends on its own input only, and attention stays within a text. So the bits of a text
do not depend on the other texts of a step. What follows the layers (a head, linears after pooling) is computed for each
text alone.

On a CPU whose C library can be used, the loop is in C (csrc/encoder.c), with the same bits: for a short text, the calls
from Python between the kernels would take as long as a quarter of the kernels.
"""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, gelu

from shared.messages import Pooling, PoolingKind, Sampling
from worker.encoder.families import EncoderSpec
from worker.encoder.weights import EncoderWeights
from worker.model_runner.runner import DeviceBroken
from worker.model_runner.step import AnyStep, ComputedStep, PooledRows, StepOutput
from worker.models.decoder import Layer, tables
from worker.models.mlp import DenseWeights
from worker.operations import FAST, Operations
from worker.ops import native as c_library
from worker.ops.activation import native as activation_native
from worker.ops.attention import text_attention
from worker.ops.linear.native import CpuWeight
from worker.ops.linear.packed import PackedLinear
from worker.ops.norm import native as norm_native
from worker.ops.rope import rotary
from worker.scheduler.sequence import Chunk, Plan, Sequence
from worker.spec import ACTIVATIONS as OF_LAYERS

ACTIVATIONS = {"identity": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "gelu": gelu}


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a step, one after another. T: tokens; S: texts"""

    token_ids: Tensor  # [T] int64
    places: Tensor  # [T] int64: the index of each token in its text
    types: Tensor | None  # [T] int64: 1 for tokens of the second text of a pair; None: all are 0
    starts: Tensor  # [S + 1] int32: the first row of each text, then T


class Encoder:
    """An encoder that is ready to run."""

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights, most_tokens: int) -> None:
        """most_tokens: the longest text"""
        self.spec, self.weights, self.most_tokens = spec, weights, most_tokens
        self.operations: Operations = FAST
        self.layers_started = c_uint64()  # a count over all steps, which shows that a long step makes progress
        model = spec.model
        self._ropes = [tables(rope, model.head_dim, most_tokens, "cpu") for rope in model.ropes]
        self._embed_scale = torch.tensor(model.embed_scale).to(weights.embed.dtype).item()
        self._norms = [*(layer.before_attention for layer in weights.layers), weights.last_norm]
        linears = [linear for layer in weights.layers for linear in layer.linears]
        in_c = c_library.available(weights.embed.dtype) and all(linear.cpu is not None for linear in linears)
        self._in_c = LayersC(spec, weights, self._ropes, self.layers_started) if in_c else None

    @torch.inference_mode()
    def hidden(self, texts: Texts) -> Tensor:
        """Returns the hidden states of all tokens after the last norm, [T, H]."""
        x = h = self._embedded(texts)
        if self._in_c is not None and self.operations is FAST:
            return self._in_c.run(x, texts)
        if (first := self._norms[0]) is not None and not self.spec.norms_after_sums:
            h = self.operations.rms_norm(x, first, self.spec.model.norm_eps, offset=self.spec.model.norm_offset)
        for index, layer in enumerate(self.weights.layers):
            self.layers_started.value += 1
            h, x = self._layer(h, x, layer, index, texts)
        return h

    def _embedded(self, texts: Texts) -> Tensor:
        spec, weights = self.spec, self.weights
        x = weights.embed.rows(texts.token_ids)
        x = x if self._embed_scale == 1.0 else x * self._embed_scale
        if weights.types is not None:
            x = x + (weights.types[0] if texts.types is None else embedding(texts.types, weights.types))
        if weights.positions is not None:
            x = x + embedding(texts.places + spec.first_position, weights.positions)
        if weights.embed_norm is None:
            return x
        return self.operations.rms_norm(x, weights.embed_norm, spec.model.norm_eps, offset=spec.model.norm_offset)

    def _layer(self, h: Tensor, x: Tensor, layer: Layer, index: int, texts: Texts) -> tuple[Tensor, Tensor]:
        """Returns the input of the next layer and the residual stream, [T, H] each. h: the input of this layer"""
        do, spec, model = self.operations, self.spec, self.spec.model
        eps, offset, scale, feed = model.norm_eps, model.norm_offset, model.residual_scale, layer.feed_forward
        assert isinstance(feed, DenseWeights)
        mixed, o = self._attention(h, layer, index, texts), layer.mixer.o
        if spec.norms_after_sums:  # the residual stream is what follows the norm
            h, _ = do.linear_add_norm(mixed, o, x, layer.after_attention, eps, offset=offset, scale=scale)
            inner, residual, last, after = self._inner(h, feed), h, layer.after_mlp, None
        else:
            h, residual = do.linear_add_norm(
                mixed, o, x, layer.before_mlp, eps, offset=offset, x_norm=layer.after_attention, scale=scale
            )
            inner, last, after = self._inner(h, feed), self._norms[index + 1], layer.after_mlp
        h, x = do.linear_add_norm(inner, feed.down, residual, last, eps, offset=offset, x_norm=after, scale=scale)
        return (h, h) if spec.norms_after_sums else (h, x)

    def _attention(self, h: Tensor, layer: Layer, index: int, texts: Texts) -> Tensor:
        """Returns the mixed values [T, heads * D]. h: the input of the projection [T, H]"""
        do, model, own = self.operations, self.spec.model, layer.mixer
        kind = model.layers[index]
        (kv_heads, head_dim), rope = model.kv_shape(kind), model.ropes[kind.rope]
        qkv = do.linear(h, own.qkv).view(len(h), -1, head_dim)  # type: ignore[attr-defined]
        q, k, v = qkv.split_with_sizes([model.heads, kv_heads, kv_heads], dim=1)
        if model.qk_norm:
            q, k = (self._head_norm(part, weight) for part, weight in ((q, own.q_norm), (k, own.k_norm)))  # type: ignore[attr-defined]
        if rope.kind != "none":
            q, k = rotary(q, k, *self._ropes[kind.rope], texts.places)
        reach = self.spec.reaches[index]
        mixed = text_attention(q, k, v, texts.starts, scale=model.attention_scale, reach=reach)
        return mixed.flatten(1)

    def _head_norm(self, part: Tensor, weight: Tensor) -> Tensor:
        model = self.spec.model
        rows = part if len(weight) == part.shape[2] else part.flatten(1)
        normed = self.operations.rms_norm(rows.contiguous(), weight, model.norm_eps, offset=model.norm_offset)
        return normed.view(part.shape)

    def _inner(self, h: Tensor, own: DenseWeights) -> Tensor:
        """Returns the input of the MLP's last linear, [T, I]."""
        do, model = self.operations, self.spec.model
        if model.gated:
            return do.gated_linear(h, own.gate_up, model.activation)
        return do.activate(do.linear(h, own.gate_up), model.activation, own.activation)

    @torch.inference_mode()
    def pooled(self, rows: Tensor, pooling: Pooling) -> NDArray[np.float32]:
        """Returns what a request asks for: the vector of a text, or the vectors of its tokens, [N, D] float32; with
        LOGITS, its scores. rows: the hidden states of the text, [tokens, H]
        """
        if pooling.kind is PoolingKind.LOGITS:
            return self._scores(rows)[:, list(pooling.token_ids)]
        vectors = pool(rows, pooling.kind)
        for spec, linear in zip(self.spec.dense, self.weights.dense, strict=True):
            activate = ACTIVATIONS[spec.activation]
            vectors = torch.cat([activate(self.operations.linear(one[None], linear)) for one in vectors])
        found: NDArray[np.float32] = vectors.numpy()
        return found

    def _scores(self, rows: Tensor) -> NDArray[np.float32]:
        """Returns the output of the classification head, [1, labels]."""
        spec, head, do = self.spec.head, self.weights.head, self.operations
        assert spec is not None and head is not None
        x = pool(rows, spec.pooling)
        if head.dense is not None:
            x = ACTIVATIONS[spec.activation](do.linear(x, head.dense))
        if head.norm is not None:
            x = do.rms_norm(x, head.norm, self.spec.model.norm_eps)
        found: NDArray[np.float32] = do.linear(x, head.out).numpy()
        return found


def pool(rows: Tensor, kind: PoolingKind) -> Tensor:
    """Returns the rows of a text [tokens, H] as one row of float32, [1, H]; as they are for TOKENS.

    A mean adds the rows in the order of the tokens.
    """
    match kind:
        case PoolingKind.FIRST:
            return rows[:1].float()
        case PoolingKind.LAST:
            return rows[-1:].float()
        case PoolingKind.TOKENS:
            return rows.float()
        case PoolingKind.MAX:
            return rows.float().amax(0, keepdim=True)
    total = np.add.reduce(rows.float().numpy(), axis=0)  # NumPy adds one row after another
    return torch.from_numpy(total / np.float32(len(rows)))[None]


# The loop over the layers in C. Its structures have the same fields, in the same order, as the structs in
# csrc/encoder.c, which explains them.

LINEARS, HEAD_NORMS = ("qkv", "o", "gate_up", "down"), ("q_norm", "k_norm")
SUM_NORMS = ("after_attention", "after_first_sum", "after_mlp", "after_second_sum")
BUFFERS = ("projected", "q", "k", "inner")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*LINEARS, *HEAD_NORMS, *SUM_NORMS, "activation", "cos", "sin")),
        *((name, c_long) for name in ("kv_heads", "d", "reach")), ("whole", c_int),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        ("kernels", c_void_p * 8), ("layers", POINTER(_Layer)), ("first_norm", c_void_p),
        *((name, c_long) for name in ("num_layers", "hidden_size", "heads", "element_size")),
        *((name, c_float) for name in ("eps", "offset", "scale", "residual_scale")),
        *((name, c_int) for name in ("activation", "gated", "is_bf16", "norms_after_sums")),
        ("layers_started", POINTER(c_uint64)),
    ]  # fmt: skip


class _Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "h", *BUFFERS, "places", "starts")),
        ("t", c_long), ("texts", c_long), ("threads", c_int),
    ]  # fmt: skip


class LayersC:
    """All layers of an encoder. It is not thread-safe, because every call uses the same buffers."""

    def __init__(
        self, spec: EncoderSpec, weights: EncoderWeights, ropes: list[tuple[Tensor, Tensor]], layers_started: c_uint64
    ) -> None:
        """ropes: cos and sin of each rotary embedding of the model"""
        loaded, model, dtype = c_library.library(), spec.model, weights.embed.dtype
        assert loaded is not None
        self._library, self._after_sums = loaded, spec.norms_after_sums
        # kept because the library holds only the addresses of these objects and their tensors
        self._referenced = weights, ropes, layers_started
        norms = list(_sum_norms(spec, weights))
        kinds = {norm_native.norm_kind(norm) for four in norms for norm in four if norm is not None}
        (kind,) = kinds or {"rms_norm"}
        names = (kind, "rms_norm", f"add_{kind}", "activate", "act_and_mul", "gemm", "rotary", "text_attention")
        functions = (ctypes.cast(getattr(c_library.kernels()[dtype], name), c_void_p) for name in names)
        self._layers = (_Layer * len(weights.layers))(
            *(_addresses(spec, at, layer, norms[at], ropes) for at, layer in enumerate(weights.layers))
        )
        first = None if spec.norms_after_sums else weights.layers[0].before_attention
        self._model = _Model(
            (c_void_p * len(names))(*functions), self._layers, c_library.address(first),
            len(weights.layers), model.hidden_size, model.heads, dtype.itemsize,
            model.norm_eps, float(model.norm_offset), model.attention_scale, model.residual_scale,
            OF_LAYERS.index(model.activation), model.gated, dtype == torch.bfloat16, spec.norms_after_sums,
            ctypes.pointer(layers_started),
        )  # fmt: skip
        linears = [{name: _linear(layer, name) for name in LINEARS} for layer in weights.layers]
        heads = max(one["o"].k for one in linears)
        self._widths = (
            max(max(one["qkv"].n, one["gate_up"].n) for one in linears), heads, heads,
            max(max(one["o"].k, one["down"].k) for one in linears),
        )  # fmt: skip
        self._buffers: list[Tensor] = []

    def run(self, x: Tensor, texts: Texts) -> Tensor:
        """Returns the hidden states after the last norm, [T, H]. x: the embedded tokens [T, H], which are overwritten

        Raises MemoryError when scratch memory cannot be allocated.
        """
        rows = x.shape[0]
        if not self._buffers or self._buffers[0].shape[0] < rows:
            size = 1 << (rows - 1).bit_length()
            self._buffers = [c_library.huge_pages(torch.empty(size, width, dtype=x.dtype)) for width in self._widths]
        h = torch.empty_like(x)
        assert x.is_contiguous() and texts.places.is_contiguous() and texts.starts.is_contiguous()
        assert texts.places.dtype == torch.int64 and texts.starts.dtype == torch.int32
        step = _Step(
            x.data_ptr(), h.data_ptr(), *(buffer.data_ptr() for buffer in self._buffers), texts.places.data_ptr(),
            texts.starts.data_ptr(), rows, texts.starts.shape[0] - 1, torch.get_num_threads(),
        )  # fmt: skip
        if self._library.encoder_forward(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError("no memory for the scratch of a layer")
        return x if self._after_sums else h


def _sum_norms(spec: EncoderSpec, weights: EncoderWeights) -> Iterator[tuple[Tensor | None, ...]]:
    """Yields the weights of SUM_NORMS of each layer."""
    following = [*(layer.before_attention for layer in weights.layers[1:]), weights.last_norm]
    for layer, after in zip(weights.layers, following, strict=True):
        if spec.norms_after_sums:
            yield None, layer.after_attention, None, layer.after_mlp
        else:
            yield layer.after_attention, layer.before_mlp, layer.after_mlp, after


def _linear(layer: Layer, name: str) -> CpuWeight:
    packed: PackedLinear = getattr(layer.mixer if name in ("qkv", "o") else layer.feed_forward, name)
    assert packed.cpu is not None
    return packed.cpu


def _addresses(
    spec: EncoderSpec, index: int, layer: Layer, norms: tuple[Tensor | None, ...], ropes: list[tuple[Tensor, Tensor]]
) -> _Layer:
    model, feed = spec.model, layer.feed_forward
    assert isinstance(feed, DenseWeights)
    kind = model.layers[index]
    kv_heads, d = model.kv_shape(kind)
    heads = [getattr(layer.mixer, name) if model.qk_norm else None for name in HEAD_NORMS]
    tables = ropes[kind.rope] if model.ropes[kind.rope].kind != "none" else (None, None)
    activation_native.check_parameters(feed.activation)
    assert all(one is None or one.is_contiguous() for one in (*norms, *heads, *tables))
    return _Layer(
        *(ctypes.addressof(_linear(layer, name).struct) for name in LINEARS),
        *map(c_library.address, (*heads, *norms, feed.activation, *tables)),
        kv_heads, d, spec.reaches[index], heads[0] is not None and heads[0].shape[0] != d,
    )  # fmt: skip


# Runs the steps of an encoder. A step has whole texts, packed by tokens; there are no pages and nothing is sampled.


class EncoderRunner:
    """Computes the steps of an encoder. A step is complete when it is launched, and its results are vectors."""

    vision = None  # encoders see no images
    cuts_prompts = False  # a text is computed as a whole, because its first tokens attend to its last ones

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def launch(self, plan: Plan, before: AnyStep | None = None) -> ComputedStep:
        """Computes the texts of a plan. Catches no exception. Never changes a sequence."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        for chunk in plan.chunks:
            if chunk.start or chunk.length != len(chunk.sequence.tokens):
                raise ValueError("an encoder computes whole texts")
        hidden = self._encoder.hidden(_texts(sequences, typed=self._encoder.spec.token_types > 1))
        begins = accumulate((len(sequence.tokens) for sequence in sequences), initial=0)
        pooled: list[PooledRows] = []
        for sequence, begin in zip(sequences, begins, strict=False):
            if sequence.pooling is not None:
                rows = hidden[begin : begin + len(sequence.tokens)]
                pooled.append((sequence, 0, self._encoder.pooled(rows, sequence.pooling)))
        return ComputedStep(plan, StepOutput([], pooled=pooled))

    def check_device(self) -> None:
        """Computes a text of one token. Raises DeviceBroken if this fails."""
        try:
            self.launch(Plan([Chunk(Sequence((b"", 0), [0], 1, Sampling(0), 0), 0, 1, False)]))
        except Exception as error:
            raise DeviceBroken(f"the CPU cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers_started(self) -> int:
        """How many layers all steps have started so far. The count grows during a long step, but not during a hang."""
        return int(self._encoder.layers_started.value)


def _texts(sequences: list[Sequence], *, typed: bool) -> Texts:
    """typed: whether the encoder tells the texts of a pair apart"""
    lengths = [len(sequence.tokens) for sequence in sequences]
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    ids = np.fromiter((token for sequence in sequences for token in sequence.tokens), np.int64, int(starts[-1]))
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    types = None
    if typed and any([sequence.second_from for sequence in sequences]):
        begins = np.repeat([sequence.second_from or len(sequence.tokens) for sequence in sequences], lengths)
        types = torch.from_numpy((places >= begins).astype(np.int64))
    return Texts(torch.from_numpy(ids), torch.from_numpy(places), types, torch.from_numpy(starts))

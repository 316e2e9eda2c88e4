"""A decoder for the CPU whose loop over the layers is in C: one call per step, and the same bits as the Python loop.

`fastest_decoder` chooses between this decoder and decoder.py once, after the model is loaded.
"""

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.models.decoder import Decoder, Layer, at_columns
from worker.models.forward_inputs import COLUMNS, Extent, ForwardInputs, InputField
from worker.models.layer_kinds import Place, feed_forward, mixer
from worker.models.per_layer_embeddings import in_c, vectors_of_layers
from worker.operations import FAST, Operations
from worker.ops import native as c_library
from worker.ops import paged_kv
from worker.ops.activation import native as activation_native
from worker.ops.attention import native as attention_native
from worker.ops.exchange import RanksC
from worker.ops.linear.lora_native import StepAdaptersC
from worker.ops.linear.native import CpuWeight
from worker.ops.moe.native import CExperts, CpuExperts, ExpertsStruct, scratch_bytes
from worker.ops.native import huge_pages, kernels, library
from worker.ops.norm import native as norm_native
from worker.ops.recurrent_state import RecurrentC
from worker.ops.rope import native as rope_native
from worker.spec import ACTIVATIONS, LatentSpec

# Runs all layers of the decoder in one call of the C library, with buffers that are reused from step to step.
#
# The result has the same bits as with the Python loop in decoder.py. This part knows only tensors and
# addresses. Its structures have the same fields, in the same order, as the structs in csrc/decoder.c.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCLayer:
    """The weights and the cache of one layer. A norm is [H], or [2, H] if it is a layer norm. None: the layer lacks
    this part.

    Sizes: H hidden, I inner, D head_dim, Hq query heads, Hk key/value heads. A layer has either `attention` or
    `recurrent`. The comment on a linear gives its numbers of inputs and outputs, first those in layers with attention.
    """

    before_attention: Tensor | None = None
    qkv: CpuWeight  # H → (Hq + 2 Hk) * D; delta_net, mamba2: H → sum of the shape's `projected`; short_conv: H → 3 H
    latent: "LatentC | None" = None  # with it, qkv and gates are `q_a` or `q`, and `kv_a`, of LatentWeights
    gates: CpuWeight | None = None  # H → Hq * D; delta_net: H → sum of DeltaNetShape.gates; mamba2: H → heads
    attention: "AttentionC | None" = None
    recurrent: RecurrentC | None = None
    o: CpuWeight  # Hq * D → H; delta_net, mamba2: values → H
    after_attention: Tensor | None = None
    before_mlp: Tensor | None = None
    gate_up: CpuWeight | None = None  # of the MLP or the shared expert: H → 2 I, or H → I without a gate
    down: CpuWeight | None = None  # I → H
    shared_gate: CpuWeight | None = None  # H → 1
    activation: Tensor | None = None  # the parameters of xielu
    experts: CExperts | None = None
    after_dense: Tensor | None = None  # the first of four norms of a layer that has both experts and an MLP
    before_router: Tensor | None = None
    before_experts: Tensor | None = None
    after_experts: Tensor | None = None
    after_mlp: Tensor | None = None
    input_gate: CpuWeight | None = None  # H → P, for per-layer embeddings [P]
    input_out: CpuWeight | None = None  # P → H
    after_input: Tensor | None = None
    scale: Tensor | None = None  # [1] float32: the factor of the layer's output

    def heads(self, ranks: int) -> int:
        """Returns how many query heads this process has in a layer with attention."""
        assert self.attention is not None
        return self.o.k // ranks // self.attention.cos.shape[1] if self.latent is None else self.latent.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionC:
    """The weights, caches and settings of an attention layer, without its linears."""

    q_norm: Tensor | None  # [D], or [Hq * D] if one norm covers all heads
    k_norm: Tensor | None  # [D], or [Hk * D] if one norm covers all heads
    v_norm: Tensor | None
    k_centre: Tensor | None  # [Hk, D] float32: is subtracted from rotated keys
    cos: Tensor  # [positions, D] float32
    sin: Tensor
    sinks: Tensor | None  # [Hq] float32
    cache_k: Tensor  # [pages, page_size, Hk, D], or with codes and their scale (worker/ops/paged_kv.py)
    cache_v: Tensor
    norm_last: bool  # if true, the norms of queries and keys follow the rotary embedding
    window: int
    group: int  # which of a step's slot mappings and page tables belong to this cache
    shares: bool  # if true, the layer only reads the cache, and another layer writes it
    bidirectional: bool = True  # if true, StepRows.bidirectional_end applies to the layer


class LatentStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q_b", "absorb", "expand", "q_a_norm", "kv_a_norm")),
        *((name, c_long) for name in ("rank", "rope", "plain", "value")), ("eps", c_float),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentC:
    """The sizes and further weights of a layer with latent attention (worker/models/latent.py)."""

    q_b: CpuWeight | None  # query_rank → Hq * query; None: DecoderCLayer.qkv makes queries
    absorb: CpuExperts  # for each head plain → rank
    expand: CpuExperts  # for each head rank → value
    q_a_norm: Tensor | None  # [query_rank]
    kv_a_norm: Tensor  # [rank]
    of: LatentSpec
    eps: float

    @property
    def heads(self) -> int:
        return self.absorb.count

    @property
    def scratch(self) -> int:
        """How many elements of scratch memory a row needs."""
        of, heads = self.of, self.heads
        return max(heads * max(of.plain, of.value), of.rank) + heads * of.rank + (heads + 1) * of.row

    @property
    def inner(self) -> int:
        """How many elements a row of the buffer `inner` needs."""
        return self.heads * max(self.of.row, self.of.query)

    def struct(self) -> LatentStruct:
        """Returns a struct that is valid as long as this record exists."""
        assert (self.q_b is None) == (self.q_a_norm is None) and self.expand.count == self.heads
        assert (self.absorb.k, self.absorb.n) == (self.of.plain, self.of.rank)
        assert (self.expand.k, self.expand.n) == (self.of.rank, self.of.value)
        return LatentStruct(
            None if self.q_b is None else ctypes.addressof(self.q_b.struct),
            ctypes.addressof(self.absorb.structs), ctypes.addressof(self.expand.structs),
            c_library.address(self.q_a_norm), c_library.address(self.kv_a_norm),
            self.of.rank, self.of.rope, self.of.plain, self.of.value, self.eps,
        )  # fmt: skip


# The functions of struct Kernels in csrc/decoder.c, in its order, after the two functions for the model's norms.
KERNELS = (
    "activate", "act_and_mul", "qkv_rope_write", "gemm", "attention", "combine", "scale_rows", "output_gate",
)  # fmt: skip

NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
LINEARS = ("gate_up", "down", "shared_gate")  # the linears of the feed-forward network
EXPERT_NORMS = ("after_dense", "before_router", "before_experts", "after_experts")
INPUT_LINEARS = ("input_gate", "input_out")
HEAD_VECTORS = ("q_norm", "k_norm", "v_norm", "k_centre")  # of AttentionC


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*NORMS, "qkv", "gates", "o", "recur", "recurrent", *LINEARS)),
        ("activation", c_void_p), ("experts", c_void_p),
        *((name, c_void_p) for name in (*EXPERT_NORMS, *INPUT_LINEARS, "after_input", "scale")),
        *((name, c_void_p) for name in (*HEAD_VECTORS, "cos", "sin", "sinks", "cache_k", "cache_v")),
        *((name, c_long) for name in ("window", "group", "kv_heads", "own_kv_heads", "d")),
        ("normed", c_int), ("kv_format", c_int), ("bidirectional", c_int), ("latent", c_void_p),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        ("kernels", c_void_p * (2 + len(KERNELS))), ("layers", POINTER(_Layer)), ("last_norm", c_void_p),
        *((name, c_long) for name in ("num_layers", "hidden_size", "heads", "page_size", "element_size", "input_size")),
        *((name, c_float) for name in ("eps", "offset", "scale", "softcap", "residual_scale")),
        ("query_scales", c_void_p), ("activation", c_int), ("parallel", c_int),
        ("is_bf16", c_int), ("layers_started", POINTER(c_uint64)), ("ranks", c_void_p),
    ]  # fmt: skip


BUFFERS = ("x", "h", "projected", "gates", "q", "inner", "gathered", "own_columns", "scratch", "inputs")


def step_struct(columns: type[Structure]) -> type[Structure]:
    """Returns the type of struct Step in csrc/decoder.c. columns: the type of the fields in csrc/step_columns.h"""
    fields = [
        *((name, c_void_p) for name in BUFFERS),
        ("columns", columns), ("page_tables", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("bidirectional_end", "cos", "sin", "rope_rows", "added_rows")),
        ("added", POINTER(c_void_p)), ("num_added", c_long), ("added_count", c_long),
        ("first", c_void_p), ("aux_hidden_states", POINTER(c_void_p)),
        *((name, c_long) for name in ("t", "seqs", "page_table_stride", "num_outputs", "layers_of_all")),
        ("threads", c_int), ("adapters", c_void_p),
    ]  # fmt: skip
    return type("Step", (Structure,), {"_fields_": fields})


@dataclass(frozen=True, slots=True)
class StepRows:
    """The T rows of a step, which belong to S sequences. R of the rows have logits."""

    columns: Structure  # the columns of the step, from columns_in_c()
    tokens: int  # T
    outputs: int  # R
    page_tables: Sequence[Tensor]  # [S, P] int32 for each group of layers
    referenced: object  # the owner of the memory to which the columns point
    bidirectional_end: Tensor | None = None  # [T] int32, as in attention_torch
    # cos, sin [M, D] for all layers, and each row's index in them [T]
    rotary: tuple[Tensor, Tensor, Tensor] | None = None
    added: Sequence[Tensor] = ()  # [i]: vectors [N, H] that are added to rows after layer i
    added_rows: Tensor | None = None  # [N] int64: the rows to which the vectors are added
    first: Tensor | None = None  # [T, K]: the input of the first layer's mixer, which replaces the normed embeddings
    # (layer, tensor [R, H]): the tensor gets the layer's rows with logits
    aux_hidden_states: Sequence[tuple[int, Tensor]] = ()

    def fields(self, layers: int) -> tuple[object, ...]:
        """Returns the fields of struct Step from `columns` to `num_outputs`. layers: how many layers the model has."""
        first = self.page_tables[0]
        for table in self.page_tables:
            assert table.shape == first.shape and table.dtype == torch.int32
            assert table.stride() == first.stride() and table.stride(1) == 1
        seen = paged_kv.rows_visible(self.bidirectional_end, self.tokens)
        rotary = self.rotary or (None, None, None)
        assert rotary[2] is None or (rotary[2].dtype == torch.int64 and len(rotary[2]) == self.tokens)
        tables = map(c_library.address, (*rotary, self.added_rows))
        rows = 0 if self.added_rows is None else len(self.added_rows)
        assert all(each.is_contiguous() and len(each) == rows for each in self.added)
        added = pointers(self.added), len(self.added), rows
        assert self.first is None or (self.first.is_contiguous() and len(self.first) == self.tokens)
        other = c_library.address(self.first), self._aux_states(layers)
        counts = self.tokens, first.shape[0], first.stride(0), self.outputs
        return self.columns, pointers(self.page_tables), seen, *tables, *added, *other, *counts

    def _aux_states(self, layers: int) -> "ctypes.Array[c_void_p] | None":
        """Returns for each layer the address of its tensor in `aux_hidden_states`, or null if it has none; None if
        there are no tensors.
        """
        if not self.aux_hidden_states:
            return None
        assert all(into.is_contiguous() and len(into) == self.outputs for _, into in self.aux_hidden_states)
        found = {index: into.data_ptr() for index, into in self.aux_hidden_states}
        return (c_void_p * layers)(*(found.get(index) for index in range(layers)))


class DecoderC:
    """All layers of a model, with one cache. It is not thread-safe, because every call uses the same buffers."""

    def __init__(
        self,
        layers: Sequence[DecoderCLayer],
        last_norm: Tensor,
        *,
        eps: float,
        offset: bool,
        scale: float,
        softcap: float,
        residual_scale: float,
        query_scales: Tensor | None,
        activation: int,
        parallel: bool,
        layers_started: c_uint64,
        columns: type[Structure],
        ranks: RanksC | None = None,
    ) -> None:
        """eps, offset: parameters of the norms; scale, softcap: parameters of attention
        residual_scale: the factor of everything that layers add to the residual stream
        query_scales [positions] float32: the factor of queries at each position; None: all factors are 1
        activation: its index in ACTIVATIONS of worker/spec.py
        parallel: if true, the feed-forward network and the mixer have the same input
        layers_started: a counter that the library increments at the start of every layer
        columns: the type of StepRows.columns
        ranks: the processes that hold the other heads and columns of the model; None: this process holds all of them
        """
        loaded = library()
        assert loaded is not None
        self._library, dtype = loaded, last_norm.dtype
        count = 1 if ranks is None else ranks.count
        attending = [(layer.heads(count), layer.attention) for layer in layers if layer.attention is not None]
        sizes = [(heads, one.cache_k.shape[1]) for heads, one in attending]
        heads, page_size = sizes[0] if sizes else (0, 1)  # a pipeline stage may have only recurrent layers
        # kept because the library holds only the addresses of these objects and their tensors
        self._referenced, self._ranks = (tuple(layers), last_norm, layers_started, query_scales), ranks
        self._hidden, self._dtype = last_norm.shape[-1], dtype
        self._experts = [None if layer.experts is None else layer.experts.struct(ranks) for layer in layers]
        self._latent = [None if layer.latent is None else layer.latent.struct() for layer in layers]
        self._layers = (_Layer * len(layers))(
            *(_addresses(*each, dtype, count) for each in zip(layers, self._experts, self._latent, strict=True))
        )
        self._mixes = layers[0].qkv.k
        recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
        latent = [layer.latent for layer in layers if layer.latent is not None]
        self._row_scratch = max(  # bytes
            [0, *(4 * each.row_floats for each in recurrent), *(dtype.itemsize * each.scratch for each in latent)]
        )
        projected = max(self._hidden, *(max(_outputs(layer, "qkv", "gate_up", "input_gate")) for layer in layers))
        gates = max(layer.gates.n if layer.gates else 0 for layer in layers)
        inner = max(self._hidden, *(max(_inputs(layer, "o", "down", "input_out")) for layer in layers))
        inner = max([inner, *(each.inner for each in latent)])
        # at least 2, because the buffer also holds the shared expert's gate, one float32, which takes two bfloat16
        # numbers
        queries = max([2, *(layer.o.k for layer in layers if layer.attention is not None)])
        queries = max([queries, *(each.heads * each.of.row for each in latent)])
        gathered = max(max(_inputs(layer, "o", "down")) for layer in layers) if ranks is not None else 0
        own_columns = self._hidden if ranks is not None else 0
        self._widths = (self._hidden, self._hidden, projected, gates, queries, inner, gathered, own_columns)
        self._model = _Model(
            _functions(dtype, norm_native.norm_kind(last_norm)), self._layers, last_norm.data_ptr(),
            len(layers), self._hidden, heads, page_size, dtype.itemsize, max(_inputs(layers[0], "input_out")),
            eps, float(offset), scale, softcap, residual_scale, c_library.address(query_scales), activation, parallel,
            dtype == torch.bfloat16, ctypes.pointer(layers_started),
            None if ranks is None else ctypes.addressof(ranks.struct),
        )  # fmt: skip
        self._step = step_struct(columns)
        self._buffers: list[Tensor] = []

    def embeddings(self, rows: int) -> Tensor:
        """Returns the buffer [rows, H], which the caller must fill with the tokens' embeddings before `run`."""
        if not self._buffers or self._buffers[0].shape[0] < rows:
            size = 1 << (rows - 1).bit_length()
            self._buffers = [huge_pages(torch.empty(size, width, dtype=self._dtype)) for width in self._widths]
            scratch = [scratch_bytes(experts, self._dtype, size) for experts in self._experts if experts is not None]
            needed = max(size * self._row_scratch, *scratch, 0)
            self._buffers.append(huge_pages(torch.empty(needed, dtype=torch.uint8)))
        return self._buffers[0][:rows]

    def run(
        self,
        rows: StepRows,
        inputs: Tensor | None = None,
        *,
        layers_of_all: int,
        outputs: StepRows | None = None,
        adapters: StepAdaptersC | None = None,
    ) -> Tensor:
        """Runs a step: writes the K/V of every row and the state of every sequence. Returns the normed output [R, H] of
        the rows with logits, which is valid until the next step.

        inputs: the per-layer embeddings [T, L, P] of a model that has them; they are overwritten
        layers_of_all: how many of the first layers compute all rows; the other layers compute only the rows with logits
        outputs: the rows with logits; None if all layers compute all rows
        adapters: LoRA adapters of some rows
        Raises MemoryError when scratch memory cannot be allocated, RankLost when another rank has died.
        """
        assert (outputs is None) == (layers_of_all == len(self._layers))
        assert outputs is None or outputs.tokens == rows.outputs
        assert rows.first is None or rows.first.shape[1] == self._mixes
        width = len(self._layers) * self._model.input_size
        assert (inputs is None) == (not width)
        assert inputs is None or (inputs.is_contiguous() and inputs.numel() == rows.tokens * width)
        assert inputs is None or inputs.dtype == self._dtype
        buffers = (*(buffer.data_ptr() for buffer in self._buffers), c_library.address(inputs))
        counts = (layers_of_all, torch.get_num_threads())
        of_all, of_outputs = (None, None) if adapters is None else adapters.addresses
        layers = len(self._layers)
        step = self._step(*buffers, *rows.fields(layers), *counts, of_all)
        last = None if outputs is None else self._step(*buffers, *outputs.fields(layers), *counts, of_outputs)
        if self._library.decoder_forward(ctypes.byref(self._model), ctypes.byref(step), last and ctypes.byref(last)):
            if self._ranks is not None:
                self._ranks.check(1)
            raise MemoryError("no memory for the scratch of a layer")
        return self._buffers[1][: rows.outputs]


def pointers(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _functions(dtype: torch.dtype, norm: str) -> "ctypes.Array[c_void_p]":
    """Returns the function addresses of struct Kernels, for tensors of `dtype`. norm: the kind of the model's norms"""
    names = (norm, f"add_{norm}", *KERNELS)
    return (c_void_p * len(names))(*(_function(dtype, name) for name in names))


def _function(dtype: torch.dtype, name: str) -> c_void_p:
    return ctypes.cast(getattr(kernels()[dtype], name), c_void_p)


def _outputs(layer: DecoderCLayer, *names: str) -> list[int]:
    """Returns how many outputs each named linear of the layer has; 0 if the layer lacks it."""
    return [0 if (linear := getattr(layer, name)) is None else linear.n for name in names]


def _inputs(layer: DecoderCLayer, *names: str) -> list[int]:
    """Returns how many inputs each named linear of the layer has; 0 if the layer lacks it."""
    return [0 if (linear := getattr(layer, name)) is None else linear.k for name in names]


def _addresses(
    layer: DecoderCLayer, experts: ExpertsStruct | None, latent: LatentStruct | None, dtype: torch.dtype, ranks: int
) -> _Layer:
    assert (layer.gate_up is None) == (layer.down is None)
    assert (layer.attention is None) == (layer.recurrent is not None)
    norms: dict[str, Tensor | None] = {
        name: getattr(layer, name) for name in (*NORMS, *EXPERT_NORMS, "after_input", "scale")
    }
    assert all(norm is None or norm.is_contiguous() for norm in norms.values())
    activation_native.check_parameters(layer.activation)
    linears: dict[str, CpuWeight | None] = {
        name: getattr(layer, name) for name in ("qkv", "gates", "o", *LINEARS, *INPUT_LINEARS)
    }
    return _Layer(
        **{name: c_library.address(norm) for name, norm in norms.items()},
        **{name: ctypes.addressof(weight.struct) for name, weight in linears.items() if weight is not None},
        recur=None if layer.recurrent is None else _function(dtype, layer.recurrent.function),
        recurrent=None if layer.recurrent is None else ctypes.addressof(layer.recurrent.struct),
        activation=c_library.address(layer.activation),
        experts=None if experts is None else ctypes.addressof(experts),
        latent=None if latent is None else ctypes.addressof(latent),
        **({} if layer.attention is None else _attention(layer.attention, layer.heads(ranks))),
    )


def _attention(attention: AttentionC, heads: int) -> dict[str, int | None]:
    """Returns the fields of _Layer that belong to attention. heads: how many query heads this process has"""
    names = (*HEAD_VECTORS, "cos", "sin", "sinks", "cache_k", "cache_v")
    read: dict[str, Tensor | None] = {name: getattr(attention, name) for name in names}
    assert all(tensor is None or tensor.is_contiguous() for tensor in read.values())
    d, kv_heads = attention.cos.shape[1], attention.cache_k.shape[2]
    attention_native.check_sinks(attention.sinks, heads)
    return {name: c_library.address(tensor) for name, tensor in read.items()} | {
        "window": attention.window, "group": attention.group, "kv_heads": kv_heads,
        "own_kv_heads": 0 if attention.shares else kv_heads, "d": d,
        "normed": rope_native.normed_heads(attention.q_norm, d, attention.norm_last),
        "kv_format": paged_kv.kv_format(attention.cache_k, attention.cache_v), "bidirectional": attention.bidirectional,
    }  # fmt: skip


class CpuDecoder:
    """Has the interface of Decoder, but works with one cache only: the C library holds the cache tensors' addresses."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, layers: list[DecoderCLayer], ranks: RanksC | None = None
    ) -> None:
        """ranks: the processes that hold the other parts of the model; None if `decoder` is whole (sharding.py)"""
        spec = decoder.spec
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self.logits = decoder.logits
        self._decoder, self._cache = decoder, cache
        self._adapters: StepAdaptersC | None = None
        self._layers = DecoderC(
            layers, decoder.weights.norm, eps=spec.norm_eps, offset=spec.norm_offset, scale=spec.attention_scale,
            softcap=spec.attention_softcap, residual_scale=spec.residual_scale, query_scales=decoder.query_scales,
            activation=ACTIVATIONS.index(spec.activation), parallel=spec.parallel,
            layers_started=decoder.layers_started, columns=STEP_COLUMNS, ranks=ranks,
        )  # fmt: skip

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.forward. `cache` must be the cache that this decoder was made with."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.hidden. The next step overwrites the returned tensor."""
        assert cache is self._cache and (inputs.read_slots is not None or not cache.states)
        decoder, layers = self._decoder, self._layers
        x = layers.embeddings(inputs.token_ids.shape[0])
        decoder.weights.embed.rows(inputs.token_ids, out=x)
        if decoder.embed_scale != 1.0:
            x *= decoder.embed_scale
        if inputs.replaced is not None:
            x.index_copy_(0, *inputs.replaced)
        own = vectors_of_layers(decoder.weights.per_layer_inputs, inputs, x, self.spec.norm_eps, self.operations)
        count = len(self.spec.layers)
        of_all = 1 + self.spec.last_kept if inputs.few_logits else count
        tables = None if inputs.rotary is None else at_columns(decoder.ropes, inputs.rotary)[0]
        outputs = _rows(inputs.only_logits(), tables) if of_all < count else None
        return layers.run(_rows(inputs, tables), own, layers_of_all=of_all, adapters=self._adapters, outputs=outputs)

    def residual(self, rows: int) -> Tensor:
        """Returns the residual stream [rows, H] after the last step. rows: the number of rows of that step"""
        return self._layers.embeddings(rows)

    def with_operations(self, operations: Operations) -> "Decoder | CpuDecoder":
        """Returns a decoder with other operations that shares the weights of this decoder.

        The C loop can run FAST, with or without adapters; a decoder with any other operations loops in Python."""
        adapters = operations.in_c()
        if adapters is None:
            return self._decoder.with_operations(operations)
        other = copy(self)
        other._adapters = adapters
        return other


def _rows(inputs: ForwardInputs, tables: tuple[Tensor, Tensor] | None) -> StepRows:
    """tables: cos and sin for each row if the step has M-RoPE, else None; a model with M-RoPE has one rotary table"""
    tokens, outputs = inputs.token_ids.shape[0], inputs.logits_indices.shape[0]
    return StepRows(columns_in_c(inputs), tokens, outputs, inputs.page_tables, inputs, inputs.bidirectional_end,
        None if tables is None or inputs.rope_rows is None else (*tables, inputs.rope_rows),
        inputs.added, None if inputs.replaced is None else inputs.replaced[0], inputs.first, inputs.aux_hidden_states,
    )  # fmt: skip


def fastest_decoder(decoder: Decoder, cache: KVCache, ranks: RanksC | None = None) -> Decoder | CpuDecoder:
    """Returns a CpuDecoder if the C library has packed all weights and supports the cache's format, else `decoder`.

    ranks: as for CpuDecoder
    """
    spec, dtype = decoder.spec, decoder.weights.embed.dtype
    places = [
        Place(index, spec, decoder.ropes, centre, cache, dtype) for index, centre in enumerate(decoder.key_centres)
    ]
    if decoder.operations is not FAST or not all(mixer(place.layer.mixer).runs_in_c(place) for place in places):
        return decoder
    if any(linear.cpu is None for layer in decoder.weights.layers for linear in layer.linears):
        return decoder
    pairs = zip(decoder.weights.layers, places, strict=True)
    return CpuDecoder(decoder, cache, [_layer_in_c(*pair) for pair in pairs], ranks)


def _layer_in_c(layer: Layer, place: Place) -> DecoderCLayer:
    mixed = mixer(layer.mixer.kind).in_c(layer.mixer, place)
    fed = feed_forward(layer.feed_forward.kind).in_c(layer.feed_forward, place.spec)
    return DecoderCLayer(
        **mixed, **fed, **(in_c(layer.per_layer_input) if layer.per_layer_input is not None else {}),
        **{name: getattr(layer, name) for name in NORMS},
        scale=None if layer.scale is None else layer.scale.float(),
    )  # fmt: skip


# Passes the columns of a step to the C library, as a structure. Its C header is made from the columns' declarations.
#
# python -m worker.models.cpu_decoder    writes the header, csrc/step_columns.h

HEADER = Path(__file__).with_name("csrc") / "step_columns.h"
TOP = """/* Fields of struct Step in decoder.c: the columns of T tokens in S sequences with R rows of logits.
 * Made from worker/models/forward_inputs.py by `python -m worker.models.cpu_decoder`: do not edit. */
"""
TYPES = {torch.int64: "int64_t", torch.int32: "int32_t"}


def header(columns: Mapping[str, InputField]) -> str:
    """Returns the text of csrc/step_columns.h: a field for each column that the C library reads, in order."""
    return TOP + "".join(_field(name, column) for name, column in columns.items() if column.in_c)


def _field(name: str, column: InputField) -> str:
    each, pointers = (" for each group of layers", "*const *") if column.grouped else ("", "*")
    none = "; NULL without recurrent layers" if column.recurrent else ""
    return f"const {TYPES[column.dtype]} {pointers}{name}; /* [{column.extent}]{each}{none} */\n"


def columns_struct(columns: Mapping[str, InputField]) -> type[Structure]:
    """Returns a structure with the fields of csrc/step_columns.h."""
    read = {name: column for name, column in columns.items() if column.in_c}
    fields = [(name, POINTER(c_void_p) if column.grouped else c_void_p) for name, column in read.items()]
    return type("StepColumns", (Structure,), {"_fields_": fields})


STEP_COLUMNS = columns_struct(COLUMNS)


def columns_in_c(inputs: ForwardInputs) -> Structure:
    """Returns the addresses of the columns. They are valid as long as `inputs` exists.

    Raises AssertionError if a column's dtype or length differs from its declaration, or if a grouped column does not
    have one array for each group of layers.
    """
    # `len` of a tensor takes eight times as long as its shape: PyTorch's is a function in Python
    sequences = inputs.seq_lens.shape[0]
    lengths = {
        Extent.TOKENS: inputs.positions.shape[0],
        Extent.SEQUENCES: sequences,
        Extent.BOUNDS: sequences + 1,
        Extent.LOGITS: inputs.logits_indices.shape[0],
    }
    assert all([table.shape[0] == sequences for table in inputs.page_tables])
    found: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        values: Any = getattr(inputs, name)
        if not column.in_c or (values is None and column.recurrent):
            continue
        assert not column.grouped or len(values) == len(inputs.page_tables), name
        for each in values if column.grouped else (values,):
            assert each.dtype == column.dtype and each.is_contiguous() and each.shape == (lengths[column.extent],), name
        found[name] = pointers(values) if column.grouped else values.data_ptr()
    return STEP_COLUMNS(**found)


if __name__ == "__main__":
    HEADER.write_text(header(COLUMNS))

"""Runs all layers of the decoder in one call of the C library, with buffers that are reused from step to step.

It gives the same bits as the Python loop in model/decoder.py. This module knows tensors and addresses only. Its
structures have the same fields, in the same order, as those in csrc/decoder.c.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu import bindings
from worker.kernels.cpu.experts_c import CExperts, ExpertsStruct, scratch_bytes
from worker.kernels.cpu.huge_pages import huge_pages
from worker.kernels.cpu.library import kernels, library
from worker.kernels.cpu.packed_weight import CpuWeight
from worker.kernels.cpu.recurrent_c import RecurrentC, check_slots
from worker.kernels.recurrent_state import StateSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCLayer:
    """One layer's weights and cache. Norms are [H], or [2, H] if they are layer norms; those of queries and keys [D].

    Sizes: H hidden, I inner, D head_dim, Hq query heads, Hk key/value heads. A layer has one of
    `attention` and `recurrent`.
    """

    before_attention: Tensor | None
    qkv: CpuWeight  # H → (Hq + 2 Hk) * D; delta, mamba: H → sum of the shape's `projected`; conv: H → 3 H
    gates: CpuWeight | None  # H → Hq * D; delta: H → sum of DeltaNetShape.gates; mamba: H → heads
    attention: "AttentionC | None"
    recurrent: RecurrentC | None
    o: CpuWeight  # Hq * D → H; delta, mamba: values → H
    after_attention: Tensor | None
    before_mlp: Tensor | None
    gate_up: CpuWeight | None  # H → 2 I, or H → I without a gate; of the shared expert if there are experts
    down: CpuWeight | None  # I → H
    shared_gate: CpuWeight | None  # H → 1
    activation: Tensor | None  # parameters of the activation
    experts: CExperts | None
    after_dense: Tensor | None  # norms of an MLP beside experts
    before_router: Tensor | None
    before_experts: Tensor | None
    after_experts: Tensor | None
    after_mlp: Tensor | None
    input_gate: CpuWeight | None  # H → P, for vectors [P] of the layer's own
    input_out: CpuWeight | None  # P → H
    after_input: Tensor | None
    scale: Tensor | None  # [1] float32, of the layer's output


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionC:
    """What attention has besides linears."""

    q_norm: Tensor | None  # or [Hq * D], and k_norm [Hk * D]: one norm of all heads
    k_norm: Tensor | None
    v_norm: Tensor | None
    cos: Tensor  # [positions, D] float32
    sin: Tensor
    sinks: Tensor | None  # [Hq] float32
    cache_k: Tensor  # [pages, page_size, Hk, D], or D + 4 in eight bits (eight_bit_kv.py)
    cache_v: Tensor
    norm_last: bool  # whether the norms of queries and keys follow the rotation
    window: int
    group: int  # which of the step's slot mappings and page tables are for this cache
    shares: bool  # whether the cache is another layer's, which writes it


# in the order of struct Kernels in csrc/decoder.c, which begins with three for the kinds of the model's norms and
# recurrent layers
KERNELS = (
    "activate", "act_and_mul", "qkv_rope_write", "gemm", "attention", "combine", "scale_rows", "output_gate",
)  # fmt: skip


NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
LINEARS = ("gate_up", "down", "shared_gate")  # of the feed-forward
EXPERT_NORMS = ("after_dense", "before_router", "before_experts", "after_experts")
INPUT_LINEARS = ("input_gate", "input_out")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*NORMS, "qkv", "gates", "o", "recurrent", *LINEARS)),
        ("activation", c_void_p), ("experts", c_void_p),
        *((name, c_void_p) for name in (*EXPERT_NORMS, *INPUT_LINEARS, "after_input", "scale")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "v_norm", "cos", "sin", "sinks", "cache_k", "cache_v")),
        *((name, c_long) for name in ("window", "group", "kv_heads", "own_kv_heads", "d")),
        ("normed", c_int), ("kv_format", c_int),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        ("kernels", c_void_p * (3 + len(KERNELS))), ("layers", POINTER(_Layer)), ("last_norm", c_void_p),
        *((name, c_long) for name in ("num_layers", "hidden_size", "heads", "page_size", "element_size", "input_size")),
        *((name, c_float) for name in ("eps", "offset", "scale", "softcap", "residual_scale")),
        ("query_scales", c_void_p), ("activation", c_int), ("parallel", c_int),
        ("is_bf16", c_int), ("layers_started", POINTER(c_uint64)),
    ]  # fmt: skip


class _Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "h", "projected", "gates", "q", "inner", "scratch", "inputs")),
        *((name, c_void_p) for name in ("logits_indices", "read_slots", "write_slots")),
        *((name, c_void_p) for name in ("positions", "query_start_loc", "seq_lens")),
        *((name, POINTER(c_void_p)) for name in ("slot_mappings", "page_tables")),
        *((name, c_long) for name in ("t", "seqs", "page_table_stride", "num_outputs", "layers_of_all")),
        ("threads", c_int),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepRows:
    """The T rows of a step, of S sequences, as in worker/model/forward_inputs.py."""

    positions: Tensor  # [T] int64
    slot_mappings: Sequence[Tensor]  # [T] int64, for each group of layers
    query_start_loc: Tensor  # [S+1] int32
    seq_lens: Tensor  # [S] int32
    page_tables: Sequence[Tensor]  # [S, P] int32, for each group of layers

    def fields(self) -> tuple[object, ...]:
        """Returns the fields of _Step from `positions` to `page_table_stride`."""
        for indices in (self.positions, *self.slot_mappings):
            assert indices.dtype == torch.int64 and indices.is_contiguous()
        ints, sequences = (self.query_start_loc, self.seq_lens), len(self.seq_lens)
        assert all(each.dtype == torch.int32 for each in ints) and len(self.query_start_loc) == sequences + 1
        first = self.page_tables[0]
        for slots, table in zip(self.slot_mappings, self.page_tables, strict=True):
            assert len(slots) == len(self.positions) and len(table) == sequences and table.dtype == torch.int32
            assert table.stride() == first.stride() and table.stride(1) == 1
        return (
            self.positions.data_ptr(), *(each.data_ptr() for each in ints), _pointers(self.slot_mappings),
            _pointers(self.page_tables), len(self.positions), sequences, first.stride(0),
        )  # fmt: skip


class DecoderC:
    """All layers of a model, with one cache. Not thread-safe: every call uses the same buffers."""

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
    ) -> None:
        """eps, offset: parameters of the norms. scale, softcap: parameters of attention. residual_scale: of what
        is added to the residual stream. query_scales [positions] float32: factors of queries. activation: position in
        ACTIVATIONS of activate.py. parallel: whether the feed-forward reads what attention reads.

        layers_started: a counter that the library increments at the start of every layer.
        """
        loaded = library()
        assert loaded is not None
        self._library, dtype = loaded, last_norm.dtype
        heads, first = next((layer.o.k, layer.attention) for layer in layers if layer.attention is not None)
        page_size, d = first.cache_k.shape[1], first.cos.shape[1]
        # the library holds addresses: keep them alive
        self._referenced = (tuple(layers), last_norm, layers_started, query_scales)
        self._hidden, self._dtype = last_norm.shape[-1], dtype
        self._experts = [None if layer.experts is None else layer.experts.struct() for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_addresses, layers, self._experts))
        recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
        self._row_scratch = 4 * max((each.row_floats for each in recurrent), default=0)  # bytes
        projected = max(self._hidden, *(max(_rows(layer, "qkv", "gate_up", "input_gate")) for layer in layers))
        gates = max(layer.gates.n if layer.gates else 0 for layer in layers)
        inner = max(self._hidden, *(max(_columns(layer, "o", "down", "input_out")) for layer in layers))
        queries = max(layer.o.k for layer in layers if layer.attention is not None)
        self._widths = (self._hidden, self._hidden, projected, gates, queries, inner)
        self._model = _Model(
            _functions(dtype, bindings.norm_kind(last_norm), recurrent), self._layers, last_norm.data_ptr(),
            len(layers), self._hidden, heads // d, page_size, dtype.itemsize, max(_columns(layers[0], "input_out")),
            eps, float(offset), scale, softcap, residual_scale, bindings.address(query_scales), activation, parallel,
            dtype == torch.bfloat16, ctypes.pointer(layers_started),
        )  # fmt: skip
        self._buffers: list[Tensor] = []

    def embeddings(self, rows: int) -> Tensor:
        """Returns the buffer [rows, H] that the caller fills with the embedded tokens before `run`."""
        if not self._buffers or len(self._buffers[0]) < rows:
            size = 1 << (rows - 1).bit_length()
            self._buffers = [huge_pages(torch.empty(size, width, dtype=self._dtype)) for width in self._widths]
            scratch = [scratch_bytes(experts, self._dtype, size) for experts in self._experts if experts is not None]
            needed = max(size * self._row_scratch, *scratch, 0)
            self._buffers.append(huge_pages(torch.empty(needed, dtype=torch.uint8)))
        return self._buffers[0][:rows]

    def run(
        self,
        rows: StepRows,
        logits_indices: Tensor,
        slots: StateSlots | None = None,
        inputs: Tensor | None = None,
        *,
        layers_of_all: int,
        outputs: StepRows | None = None,
    ) -> Tensor:
        """Runs a step, which writes the K/V of every row and the state of every sequence. Returns the normed output
        [R, H] of `logits_indices`.

        The output is valid until the next step.

        logits_indices [R], which ascend, int64; slots where there are recurrent layers; inputs [T, L, P], which is
        overwritten, where layers have vectors. All rows pass the first `layers_of_all`
        layers. `outputs` are the rows of logits_indices, which alone pass the others. Raises MemoryError when a
        kernel's scratch memory cannot be allocated.
        """
        assert slots is not None or not self._row_scratch
        if slots is not None:
            check_slots(slots)
        assert logits_indices.dtype == torch.int64 and logits_indices.is_contiguous()
        assert (outputs is None) == (layers_of_all == len(self._layers))
        assert outputs is None or len(outputs.positions) == len(logits_indices)
        width = len(self._layers) * self._model.input_size
        assert (inputs is None) == (not width)
        assert inputs is None or (inputs.is_contiguous() and inputs.numel() == len(rows.positions) * width)
        assert inputs is None or inputs.dtype == self._dtype
        buffers = (*(buffer.data_ptr() for buffer in self._buffers), bindings.address(inputs))
        counts = (len(logits_indices), layers_of_all, torch.get_num_threads())
        states = (None, None) if slots is None else (slots.read.data_ptr(), slots.write.data_ptr())
        step = _Step(*buffers, logits_indices.data_ptr(), *states, *rows.fields(), *counts)
        last = None if outputs is None else _Step(*buffers, None, None, None, *outputs.fields(), *counts)
        if self._library.decoder_forward(ctypes.byref(self._model), ctypes.byref(step), last and ctypes.byref(last)):
            raise MemoryError("no memory for the scratch of a layer")
        return self._buffers[1][: len(logits_indices)]


def _pointers(tensors: Sequence[Tensor]) -> "ctypes.Array[c_void_p]":
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _functions(dtype: torch.dtype, norm: str, recurrent: Sequence[RecurrentC]) -> "ctypes.Array[c_void_p]":
    """Returns the addresses of struct Kernels, for tensors of `dtype`. All recurrent layers are of one kind."""
    kinds = {layer.function for layer in recurrent}
    assert len(kinds) <= 1
    names = (norm, f"add_{norm}", *(kinds or (None,)), *KERNELS)
    functions = kernels()[dtype]
    return (c_void_p * len(names))(
        *(None if name is None else ctypes.cast(getattr(functions, name), c_void_p) for name in names)
    )


def _rows(layer: DecoderCLayer, *names: str) -> list[int]:
    """Returns the outputs of linears of a layer, 0 for one that it lacks."""
    return [0 if (linear := getattr(layer, name)) is None else linear.n for name in names]


def _columns(layer: DecoderCLayer, *names: str) -> list[int]:
    """Returns the inputs of linears of a layer, 0 for one that it lacks."""
    return [0 if (linear := getattr(layer, name)) is None else linear.k for name in names]


def _addresses(layer: DecoderCLayer, experts: ExpertsStruct | None) -> _Layer:
    assert (layer.gate_up is None) == (layer.down is None) and (layer.experts is not None or layer.down is not None)
    assert (layer.attention is None) == (layer.recurrent is not None)
    norms: dict[str, Tensor | None] = {
        name: getattr(layer, name) for name in (*NORMS, *EXPERT_NORMS, "after_input", "scale")
    }
    assert all(norm is None or norm.is_contiguous() for norm in norms.values())
    bindings.check_parameters(layer.activation)
    linears: dict[str, CpuWeight | None] = {
        name: getattr(layer, name) for name in ("qkv", "gates", "o", *LINEARS, *INPUT_LINEARS)
    }
    return _Layer(
        **{name: bindings.address(norm) for name, norm in norms.items()},
        **{name: ctypes.addressof(weight.struct) for name, weight in linears.items() if weight is not None},
        recurrent=None if layer.recurrent is None else ctypes.addressof(layer.recurrent.struct),
        activation=bindings.address(layer.activation),
        experts=None if experts is None else ctypes.addressof(experts),
        **({} if layer.attention is None else _attention(layer.attention, layer.o.k)),
    )


def _attention(attention: AttentionC, width: int) -> dict[str, int | None]:
    """Returns the fields of _Layer that belong to attention. width: of all query heads."""
    names = ("q_norm", "k_norm", "v_norm", "cos", "sin", "sinks", "cache_k", "cache_v")
    read: dict[str, Tensor | None] = {name: getattr(attention, name) for name in names}
    assert all(tensor is None or tensor.is_contiguous() for tensor in read.values())
    d, kv_heads = attention.cos.shape[1], attention.cache_k.shape[2]
    bindings.check_sinks(attention.sinks, width // d)
    return {name: bindings.address(tensor) for name, tensor in read.items()} | {
        "window": attention.window, "group": attention.group, "kv_heads": kv_heads,
        "own_kv_heads": 0 if attention.shares else kv_heads, "d": d,
        "normed": bindings.normed_heads(attention.q_norm, d, attention.norm_last),
        "kv_format": bindings.kv_format(attention.cache_v),
    }  # fmt: skip

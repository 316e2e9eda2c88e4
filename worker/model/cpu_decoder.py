"""A decoder for the CPU whose loop over the layers is in C: one call per step, and the same bits as the Python loop.

`fastest_decoder` chooses between this decoder and model/decoder.py once, after the model is loaded.
"""

from typing import Any

import torch
from torch import Tensor

from worker.kernels.activate import ACTIVATIONS
from worker.kernels.cpu import bindings
from worker.kernels.cpu import delta_net as delta_net_c
from worker.kernels.cpu import mamba2 as mamba2_c
from worker.kernels.cpu import short_conv as short_conv_c
from worker.kernels.cpu.decoder_c import (
    EXPERT_NORMS,
    NORMS,
    AttentionC,
    DecoderC,
    DecoderCLayer,
    StepRows,
)
from worker.kernels.cpu.recurrent_c import RecurrentC
from worker.kernels.delta_net import DeltaNetShape
from worker.kernels.experts import in_c
from worker.kernels.mamba2 import Mamba2Shape
from worker.kernels.operations import FAST
from worker.kernels.short_conv import ShortConvShape
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.forward_inputs import ForwardInputs
from worker.model.spec import RecurrentShape


class CpuDecoder:
    """Has the interface of Decoder, but works with one cache only: the C library holds the addresses of its tensors."""

    def __init__(self, decoder: Decoder, cache: KVCache, layers: list[DecoderCLayer]) -> None:
        spec = decoder.spec
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self.logits = decoder.logits
        self._decoder, self._cache = decoder, cache
        self._layers = DecoderC(
            layers, decoder.weights.norm, eps=spec.norm_eps, offset=spec.norm_offset, scale=spec.attention_scale,
            softcap=spec.attention_softcap, residual_scale=spec.residual_scale, query_scales=decoder.query_scales,
            activation=ACTIVATIONS.index(spec.activation), parallel=spec.parallel,
            layers_started=decoder.layers_started,
        )  # fmt: skip

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.forward. `cache` must be the one that this decoder was made for."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.hidden. The next step overwrites the result."""
        assert cache is self._cache
        decoder, layers = self._decoder, self._layers
        x = layers.embeddings(len(inputs.token_ids))
        torch.index_select(decoder.weights.embed, 0, inputs.token_ids, out=x)
        if decoder.embed_scale != 1.0:
            x *= decoder.embed_scale
        own = decoder.layer_inputs(inputs.token_ids, x)
        count = len(self.spec.layers)
        of_all = 1 + self.spec.last_kept if inputs.few_logits else count
        return layers.run(
            _rows(inputs), inputs.logits_indices, inputs.state_slots, own, layers_of_all=of_all,
            outputs=_rows(inputs.only_logits()) if of_all < count else None,
        )  # fmt: skip


def _rows(inputs: ForwardInputs) -> StepRows:
    return StepRows(inputs.positions, inputs.slot_mappings, inputs.query_start_loc, inputs.seq_lens, inputs.page_tables)


def fastest_decoder(decoder: Decoder, cache: KVCache) -> Decoder | CpuDecoder:
    """Returns a CpuDecoder if the C library has packed all weights and supports the cache's format; else `decoder`."""
    dtype, spec = decoder.weights.embed.dtype, decoder.spec
    caches = [
        (cache.layer(index)[0], spec.kv_shape(layer)[1])
        for index, layer in enumerate(spec.layers)
        if not layer.recurrent
    ]
    if decoder.operations is not FAST or not all(bindings.supports_cache(dtype, *each) for each in caches):
        return decoder
    if not _recurs_in_c(decoder.spec.recurrent, dtype):
        return decoder
    layers = [_layer_in_c(decoder, index, cache) for index in range(len(decoder.weights.layers))]
    packed = [layer for layer in layers if layer is not None]
    return CpuDecoder(decoder, cache, packed) if len(packed) == len(layers) else decoder


def _recurs_in_c(shape: RecurrentShape | None, dtype: torch.dtype) -> bool:
    match shape:
        case DeltaNetShape():
            return delta_net_c.supports(dtype, shape)
        case Mamba2Shape():
            return mamba2_c.supports(dtype, shape)
        case ShortConvShape():
            return short_conv_c.supports(dtype, shape.taps)
        case None:
            return True


def _layer_in_c(decoder: Decoder, index: int, cache: KVCache) -> DecoderCLayer | None:
    layer, kind = decoder.weights.layers[index], decoder.spec.layers[index]
    names = ("qkv", "gates", "o", "gate_up", "down", "shared_gate", "input_gate", "input_out")
    linears: dict[str, Any] = {name: getattr(layer, name) for name in names}
    if any(linear is not None and linear.cpu is None for linear in linears.values()):
        return None
    experts = None
    if layer.experts is not None and decoder.spec.experts is not None:
        chosen, normalized = decoder.spec.experts.chosen, decoder.spec.experts.normalized
        experts = in_c(layer.experts, chosen, decoder.spec.activation, normalized=normalized)
        if experts is None:
            return None
    return DecoderCLayer(
        **{name: linear and linear.cpu for name, linear in linears.items()},
        **{name: getattr(layer, name) for name in (*NORMS, *EXPERT_NORMS, "after_input")},
        scale=None if layer.scale is None else layer.scale.float(), activation=layer.activation, experts=experts,
        recurrent=_recurrent_in_c(decoder, index, cache) if kind.recurrent else None,
        attention=None if kind.recurrent else _attention_in_c(decoder, index, cache),
    )  # fmt: skip


def _attention_in_c(decoder: Decoder, index: int, cache: KVCache) -> AttentionC:
    layer, kind = decoder.weights.layers[index], decoder.spec.layers[index]
    (cos, sin), (cache_k, cache_v) = decoder.ropes[kind.rope], cache.layer(index)
    return AttentionC(
        q_norm=layer.q_norm, k_norm=layer.k_norm, v_norm=layer.v_norm, cos=cos, sin=sin, sinks=layer.sinks,
        cache_k=cache_k, cache_v=cache_v, norm_last=decoder.spec.qk_norm_last, window=kind.window,
        group=cache.group_of[index], shares=kind.shares is not None,
    )  # fmt: skip


def _recurrent_in_c(decoder: Decoder, index: int, cache: KVCache) -> RecurrentC:
    layer, state, eps = decoder.weights.layers[index], cache.states[index], decoder.spec.norm_eps
    match decoder.spec.recurrent:
        case DeltaNetShape() as shape if layer.delta is not None:
            return delta_net_c.layer_in_c(layer.delta, shape, state, eps)
        case Mamba2Shape() as shape if layer.mamba is not None:
            return mamba2_c.layer_in_c(layer.mamba, shape, state, eps)
    assert layer.conv is not None
    return short_conv_c.layer_in_c(layer.conv, state)

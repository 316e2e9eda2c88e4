"""The decoder: one plain loop over the layers. A family is data in the spec; an absent norm is None.

It knows no sequences, only rows: what a row may look at is in ForwardInputs, and each kernel reads that for itself.
"""

from collections.abc import Callable
from copy import copy
from ctypes import c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from worker.kernels.cpu.decoder_c import DecoderC, DecoderCLayer
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import FAST, Operations
from worker.kv_cache.tensors import Cache
from worker.model import rope
from worker.model.forward_inputs import ForwardInputs
from worker.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights. H hidden, I intermediate, D head_dim; norms are [H], or [D] on queries and keys."""

    before_attention: Tensor
    qkv: PackedLinear  # H → query heads, key heads, value heads
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o: PackedLinear  # query heads → H
    after_attention: Tensor | None = None
    before_mlp: Tensor
    gate_up: PackedLinear  # H → 2 I
    down: PackedLinear  # I → H
    after_mlp: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, on one device."""

    embed: Tensor  # [vocab, H]
    layers: list[Layer]
    norm: Tensor  # [H]
    head: PackedLinear  # H → vocab


class Decoder:
    """A model that is ready to run. Holds no state of any sequence: that is the cache's."""

    def __init__(self, spec: ModelSpec, weights: Weights, positions: int, operations: Operations = FAST) -> None:
        """Serves positions 0 .. positions - 1 (rotary tables are made for those)."""
        self.spec, self.weights, self.operations = spec, weights, operations
        self.done = c_uint64()  # layers begun, in all steps: shows that a long step makes progress
        self.ropes = [rope.tables(table, spec.head_dim, positions, weights.embed.device) for table in spec.ropes]
        self.norms = [*(layer.before_attention for layer in weights.layers), weights.norm]
        # Rounded to the weights' format first, as the checkpoints were trained: sqrt(1152) is 34 in bfloat16.
        self.embed_scale = torch.tensor(spec.embed_scale).to(weights.embed.dtype).item()

    def forward(self, inputs: ForwardInputs, cache: Cache) -> Tensor:
        """Writes the K/V of every row and returns the logits of inputs.logits_indices, [R, vocab] float32."""
        do, last = self.operations, len(self.weights.layers) - 1
        eps, offset = self.spec.norm_eps, self.spec.norm_offset
        x = embedding(inputs.token_ids, self.weights.embed)  # [T, H]
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        h = do.rms_norm(x, self.norms[0], eps, offset=offset)
        for index, (layer, kind) in enumerate(zip(self.weights.layers, self.spec.layers, strict=True)):
            self.done.value += 1
            h = self._attend(h, layer, kind, inputs, cache.layer(index))  # [T, heads * D]
            if index == last:  # K/V are written: from here on only the rows that are asked for matter
                if not len(inputs.logits_indices):
                    return x.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
                if not inputs.all_logits:
                    h, x = h[inputs.logits_indices], x[inputs.logits_indices]
            h, x = do.add_rms_norm(
                do.linear(h, layer.o, split_k=True),
                x,
                layer.before_mlp,
                eps,
                offset=offset,
                x_norm=layer.after_attention,
            )
            h = do.gated_linear(h, layer.gate_up, self.spec.activation)
            h, x = do.add_rms_norm(
                do.linear(h, layer.down, split_k=True),
                x,
                self.norms[index + 1],
                eps,
                offset=offset,
                x_norm=layer.after_mlp,
            )
        return self._logits(h)

    def count_replayed(self) -> None:
        """Counts the layers of a forward that a CUDA graph did, in which none of this code ran."""
        self.done.value += len(self.weights.layers)

    def using(self, operations: Operations) -> "Decoder":
        """The same decoder with other operations."""
        other = copy(self)
        other.operations = operations
        return other

    def on(self, cache: Cache) -> Callable[[ForwardInputs], Tensor]:
        """`forward` over this cache, by the fastest way there is here; the same bits."""
        stack = self._stack(cache) if self.operations is FAST else None
        if stack is None:
            return lambda inputs: self.forward(inputs, cache)

        def forward(inputs: ForwardInputs) -> Tensor:
            x = stack.embedded(len(inputs.token_ids))
            torch.index_select(self.weights.embed, 0, inputs.token_ids, out=x)
            if self.embed_scale != 1.0:
                x *= self.embed_scale
            h = stack.run(
                inputs.positions, inputs.slot_mapping, inputs.query_start_loc, inputs.seq_lens, inputs.page_table,
                inputs.logits_indices,
            )  # fmt: skip
            return self._logits(h)

        return forward

    def _stack(self, cache: Cache) -> DecoderC | None:
        """The C library's, where it has all the weights and knows the cache's format."""
        if cache.k.dtype != self.weights.embed.dtype:
            return None
        layers = [self._stack_layer(index, cache) for index in range(len(self.weights.layers))]
        whole = [layer for layer in layers if layer is not None]
        if len(whole) < len(layers):
            return None
        spec = self.spec
        return DecoderC(
            whole, self.weights.norm, eps=spec.norm_eps, offset=spec.norm_offset, scale=spec.attention_scale,
            activation=spec.activation, done=self.done,
        )  # fmt: skip

    def _stack_layer(self, index: int, cache: Cache) -> DecoderCLayer | None:
        layer, kind = self.weights.layers[index], self.spec.layers[index]
        qkv, o, gate_up, down = layer.qkv.cpu, layer.o.cpu, layer.gate_up.cpu, layer.down.cpu
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        (cos, sin), (cache_k, cache_v) = self.ropes[kind.rope], cache.layer(index)
        return DecoderCLayer(
            before_attention=layer.before_attention, qkv=qkv, q_norm=layer.q_norm, k_norm=layer.k_norm,
            cos=cos, sin=sin, cache_k=cache_k, cache_v=cache_v, window=kind.window,
            o=o, after_attention=layer.after_attention, before_mlp=layer.before_mlp, gate_up=gate_up, down=down,
            after_mlp=layer.after_mlp,
        )  # fmt: skip

    def _attend(
        self, h: Tensor, layer: Layer, kind: LayerSpec, inputs: ForwardInputs, kv: tuple[Tensor, Tensor]
    ) -> Tensor:
        do, spec = self.operations, self.spec
        q = do.qkv_rope_write(
            do.linear(h, layer.qkv, split_k=True), *kv, *self.ropes[kind.rope], inputs.positions, inputs.slot_mapping,
            q_norm=layer.q_norm, k_norm=layer.k_norm, eps=spec.norm_eps, offset=spec.norm_offset, dtype=h.dtype,
        )  # fmt: skip
        mixed = do.attention(
            q, *kv, inputs.query_start_loc, inputs.seq_lens, inputs.page_table, inputs.max_kv_len,
            scale=spec.attention_scale, window=kind.window,
        )  # fmt: skip
        return mixed.flatten(1)

    def _logits(self, h: Tensor) -> Tensor:
        logits = self.operations.linear(h, self.weights.head, fp32_out=True)  # [R, vocab]
        cap = self.spec.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits

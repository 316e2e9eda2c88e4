"""The decoder: one plain loop over the layers. The spec describes the model family; a norm that it lacks is None.

The decoder works on rows and knows no sequences. The kernels read from ForwardInputs what each row may attend to.
"""

from collections.abc import Iterator
from copy import copy
from ctypes import c_uint64
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from worker.kernels.delta_net import DeltaNetWeights
from worker.kernels.experts import Experts, PackedExperts
from worker.kernels.linear import PackedLinear
from worker.kernels.mamba2 import Mamba2Weights
from worker.kernels.operations import FAST, Operations
from worker.kernels.recurrent_state import RecurrentState
from worker.kv_cache.tensors import KVCache
from worker.model import rope
from worker.model.forward_inputs import ForwardInputs
from worker.model.layer_inputs import LayerInputs, vectors_of_layers
from worker.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer. Norms are [H], or [2, H] if they are layer norms; those of queries and keys are [D].

    H: hidden size; I: intermediate size; D: head_dim; P: size of a layer's input. Each comment begins with the names in
    Hugging Face checkpoints. A recurrent layer has `delta`, `mamba` or `conv`, and qkv, gates and o are those of the
    gated delta rule, of Mamba-2 or of the convolution.
    """

    before_attention: Tensor | None = None  # input_layernorm
    qkv: PackedLinear  # q_proj, k_proj, v_proj: H → query heads, key heads, value heads
    # delta: in_proj_qkv, in_proj_z: H → queries, keys, values, output gates; conv: in_proj: H → b, c, x;
    # mamba: in_proj: H → output gates, x, b, c
    # gates: half of q_proj: H → query heads; delta: in_proj_b, in_proj_a: H → b, a; mamba: in_proj: H → dt
    gates: PackedLinear | None = None
    delta: DeltaNetWeights | None = None  # conv1d, A_log, dt_bias, norm
    mamba: Mamba2Weights | None = None  # conv1d, A_log, dt_bias, D, norm
    conv: Tensor | None = None  # conv [taps, H] float32
    q_norm: Tensor | None = None  # q_norm
    k_norm: Tensor | None = None  # k_norm
    v_norm: Tensor | None = None  # ones: of values that are divided by their root mean square
    sinks: Tensor | None = None  # sinks [query heads] float32: logits of a key whose value is zero
    o: PackedLinear  # o_proj: query heads → H; delta, mamba, conv: out_proj: values → H
    after_attention: Tensor | None = None  # post_attention_layernorm of Gemma, before the residual sum
    before_mlp: Tensor | None = None  # post_attention_layernorm; Gemma: pre_feedforward_layernorm
    gate_up: PackedLinear | None = None  # gate_proj, up_proj: H → 2 I; of the shared expert if there are experts;
    # up_proj: H → I if there is no gate
    down: PackedLinear | None = None  # down_proj: I → H
    activation: Tensor | None = None  # act_fn: parameters of the activation [4] float32
    shared_gate: PackedLinear | None = None  # shared_expert_gate: H → 1
    experts: Experts | None = None
    after_dense: Tensor | None = None  # post_feedforward_layernorm_1: of an MLP beside experts, before they are added
    before_router: Tensor | None = None  # router.scale / sqrt(H)
    before_experts: Tensor | None = None  # pre_feedforward_layernorm_2
    after_experts: Tensor | None = None  # post_feedforward_layernorm_2
    after_mlp: Tensor | None = None  # post_feedforward_layernorm of Gemma, before the residual sum
    input_gate: PackedLinear | None = None  # per_layer_input_gate: H → P
    input_out: PackedLinear | None = None  # per_layer_projection: P → H
    after_input: Tensor | None = None  # post_per_layer_input_norm
    scale: Tensor | None = None  # layer_scalar [1]

    @property
    def next_weights(self) -> list[Tensor]:
        """The weights that are read after attention, in order."""
        return [linear.memory for linear in (self.o, self.gate_up) if linear is not None]

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]:
        """All linears of this layer."""
        every = (
            self.qkv,
            self.gates,
            self.o,
            self.gate_up,
            self.down,
            self.shared_gate,
            self.input_gate,
            self.input_out,
        )
        yield from (linear for linear in every if linear is not None)
        if self.experts is not None:
            yield from (self.experts.router, self.experts.gate_up, self.experts.down)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, on one device."""

    embed: Tensor  # embed_tokens [vocab, H]
    layers: list[Layer]
    norm: Tensor  # norm [H]
    head: PackedLinear  # lm_head: H → vocab
    layer_inputs: LayerInputs | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the embeddings and of all linears in memory."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return self.embed.nbytes + inputs + sum(linear.nbytes for linear in (*linears, self.head))


class Decoder:
    """A model that is ready to run. The state of sequences is in the cache, not in the decoder."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_positions: int, operations: Operations = FAST) -> None:
        """max_positions: the rotary tables cover positions 0 .. max_positions - 1."""
        self.spec, self.weights, self.operations, self.max_positions = spec, weights, operations, max_positions
        self.layers_started = c_uint64()  # counts over all steps: shows that a long step makes progress
        self.ropes = [rope.tables(table, spec.head_dim, max_positions, weights.embed.device) for table in spec.ropes]
        self.query_scales = rope.query_scales(spec.query_scaling, max_positions, weights.embed.device)
        self.norms = [*(layer.before_attention for layer in weights.layers), weights.norm]
        # The scale is rounded to the weights' format, as in training: sqrt(1152) is 34 in bfloat16.
        self.embed_scale = torch.tensor(spec.embed_scale).to(weights.embed.dtype).item()

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Writes the K/V of every row and returns the logits of inputs.logits_indices, [R, vocab] float32."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Does the same without the head: returns the output of the final norm, [R, H]."""
        do, last = self.operations, len(self.weights.layers) - 1
        kept = self.spec.last_kept if inputs.few_logits else last
        eps, offset, scale = self.spec.norm_eps, self.spec.norm_offset, self.spec.residual_scale
        x = embedding(inputs.token_ids, self.weights.embed)  # [T, H]
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        own = self.layer_inputs(inputs.token_ids, x)
        h = x if self.norms[0] is None else do.rms_norm(x, self.norms[0], eps, offset=offset)
        for index, (layer, kind) in enumerate(zip(self.weights.layers, self.spec.layers, strict=True)):
            self.layers_started.value += 1
            normed = h
            if kind.recurrent:
                h = self._recur(h, layer, inputs, cache.states[index])  # [T, values]
            else:
                h = self._attend(h, layer, kind, inputs, cache.layer(index), cache.group_of[index])  # [T, heads * D]
            if index == kept:  # all K/V and states are written: from here on only the rows with logits matter
                if not len(inputs.logits_indices):
                    return x[:0]
                if not inputs.all_logits:
                    h, x, normed = (rows[inputs.logits_indices] for rows in (h, x, normed))
                    own = None if own is None else own[inputs.logits_indices]
                if kept < last:
                    inputs = inputs.only_logits()
            after, before = layer.after_attention, layer.before_mlp
            h, x = do.linear_add_norm(h, layer.o, x, before, eps, offset=offset, x_norm=after, scale=scale)
            h, down = self._feed_forward(normed if self.spec.parallel else h, x, layer)
            before = self.norms[index + 1] if own is None and layer.scale is None else None
            how = {"offset": offset, "x_norm": layer.after_mlp, "scale": scale}
            if down is None:
                h, x = do.add_rms_norm(h, x, before, eps, **how)
            else:
                h, x = do.linear_add_norm(h, down, x, before, eps, **how)
            if own is not None:
                h, x = self._add_input(x, own[:, index], layer)
            if layer.scale is not None:
                h = x = x * layer.scale
            if before is None and (weight := self.norms[index + 1]) is not None:
                h = do.rms_norm(x, weight, eps, offset=offset)
        return h

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Returns the vectors of all layers [T, L, P], None if the model has none. x [T, H]: scaled embeddings."""
        weights, do = self.weights.layer_inputs, self.operations
        if weights is None:
            return None
        return vectors_of_layers(weights, token_ids, x, self.spec.norm_eps, do.linear, do.rms_norm)

    def logits(self, h: Tensor) -> Tensor:
        """Computes the logits [R, vocab] float32. h: the normed output of the last layer [R, H]."""
        if not len(h):
            return h.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = self.operations.linear(h, self.weights.head, fp32_out=True)
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def count_replayed(self) -> None:
        """Counts the layers of a forward that a CUDA graph replayed: a replay does not run forward()."""
        self.layers_started.value += len(self.weights.layers)

    def count_loads(self) -> Tensor:
        """Counts from now on how many rows choose each expert: returns [layers, E] int64, to which every step adds."""
        layers, spec = self.weights.layers, self.spec.experts
        shape = (len(layers), 0 if spec is None else spec.count)
        loads = torch.zeros(shape, dtype=torch.int64, device=self.weights.embed.device)
        counting = [
            layer if layer.experts is None else replace(layer, experts=replace(layer.experts, loads=load))
            for layer, load in zip(layers, loads, strict=True)
        ]
        self.weights = replace(self.weights, layers=counting)
        return loads

    def with_operations(self, operations: Operations) -> "Decoder":
        """Returns a copy of this decoder with other operations. Both share the weights and `layers_started`."""
        other = copy(self)
        other.operations = operations
        return other

    def _attend(
        self, h: Tensor, layer: Layer, kind: LayerSpec, inputs: ForwardInputs, kv: tuple[Tensor, Tensor], group: int
    ) -> Tensor:
        do, spec, slots = self.operations, self.spec, inputs.slot_mappings[group]
        gate = None if layer.gates is None else do.linear(h, layer.gates)
        shares = kind.shares is not None  # then the layer has query heads only
        written, k_norm = ([part[:, :, :0] for part in kv], layer.q_norm) if shares else (kv, layer.k_norm)
        q = do.qkv_rope_write(
            do.linear(h, layer.qkv, split_k=True), *written, *self.ropes[kind.rope], inputs.positions, slots,
            q_norm=layer.q_norm, k_norm=k_norm, v_norm=layer.v_norm, eps=spec.norm_eps, offset=spec.norm_offset,
            dtype=h.dtype, norm_last=spec.qk_norm_last,
        )  # fmt: skip
        if self.query_scales is not None:
            q = (q.float() * self.query_scales[inputs.positions, None, None]).to(q.dtype)
        mixed = do.attention(
            q, *kv, inputs.query_start_loc, inputs.seq_lens, inputs.page_tables[group], inputs.max_kv_len,
            scale=spec.attention_scale, window=kind.window, sinks=layer.sinks, softcap=spec.attention_softcap,
            next_weights=layer.next_weights,
        )  # fmt: skip
        return mixed.flatten(1) if gate is None else do.output_gate(mixed.flatten(1), gate)

    def _recur(self, h: Tensor, layer: Layer, inputs: ForwardInputs, state: RecurrentState) -> Tensor:
        do, slots, projected = self.operations, inputs.state_slots, self.operations.linear(h, layer.qkv)
        if layer.conv is not None:
            return do.short_conv(projected, layer.conv, state, slots)
        assert layer.gates is not None
        gates, eps = do.linear(h, layer.gates), self.spec.norm_eps
        if layer.mamba is not None:
            return do.mamba2(projected, gates, layer.mamba, self.spec.recurrent, state, slots, eps)
        return do.delta_net(projected, gates, layer.delta, self.spec.recurrent, state, slots, eps)

    def _add_input(self, x: Tensor, own: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Adds to x [T, H] what the layer makes of its vectors [T, P]. Returns the sum twice."""
        do, spec = self.operations, self.spec
        assert layer.input_gate is not None and layer.input_out is not None
        gated = do.act_and_mul(torch.cat((do.linear(x, layer.input_gate), own), dim=1), spec.activation)
        added = do.linear(gated, layer.input_out, split_k=True)
        return do.add_rms_norm(added, x, None, spec.norm_eps, offset=spec.norm_offset, x_norm=layer.after_input)

    def _feed_forward(self, h: Tensor, x: Tensor, layer: Layer) -> tuple[Tensor, PackedLinear | None]:
        """Returns the output of the layer's feed-forward network, or the input of its last linear and this linear.

        h: the normed rows [T, H]; x: the residual stream, which experts beside an MLP read by norms of their own.
        """
        do, activation, spec = self.operations, self.spec.activation, self.spec.experts
        dense = None
        if layer.gate_up is not None and layer.down is not None:
            if self.spec.gated:
                inner = do.gated_linear(h, layer.gate_up, activation)
            else:
                inner = do.activate(do.linear(h, layer.gate_up), activation, layer.activation)
            if layer.experts is None:
                return inner, layer.down
            dense = do.linear(inner, layer.down)
        assert layer.experts is not None and spec is not None
        if spec.beside_mlp:
            return self._add_experts(dense, x, layer), None
        gate = None if layer.shared_gate is None else do.linear(h, layer.shared_gate, fp32_out=True)
        mixed = do.experts(
            h, layer.experts, spec.chosen, activation, normalized=spec.normalized, add=dense, add_gate=gate
        )
        return mixed, None

    def _add_experts(self, dense: Tensor | None, x: Tensor, layer: Layer) -> Tensor:
        """Returns the normed outputs of an MLP [T, H] and of experts, added."""
        do, spec, eps, offset = self.operations, self.spec.experts, self.spec.norm_eps, self.spec.norm_offset
        assert spec is not None and layer.experts is not None and dense is not None
        normed = do.rms_norm(x, layer.before_experts, eps, offset=offset)
        chosen = do.experts(
            normed, layer.experts, spec.chosen, self.spec.activation, normalized=spec.normalized,
            router_input=do.rms_norm(x, layer.before_router, eps),
        )  # fmt: skip
        dense = do.rms_norm(dense, layer.after_dense, eps, offset=offset)
        return do.add_rms_norm(chosen, dense, None, eps, offset=offset, x_norm=layer.after_experts)[1]

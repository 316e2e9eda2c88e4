"""The decoder: one plain loop over the layers. The spec describes the model family; a norm that a family lacks is None.

The decoder works on rows and knows no sequences. The kernels read from ForwardInputs which positions each row may
attend to. The kinds of layers are in mixers/ and feed_forward/.
"""

from copy import copy
from ctypes import c_uint64
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from worker.kernels.operations import FAST, Exchange, Operations, alone
from worker.kv_cache.tensors import KVCache
from worker.model import rope
from worker.model.feed_forward.kinds import feed_forward
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.layer import Weights
from worker.model.layer_inputs import add_own_input, add_vectors, vectors_of_layers, write_tapped
from worker.model.layer_parts import Step
from worker.model.mixers.kinds import mixer
from worker.spec import ModelSpec


class Decoder:
    """A model that is ready to run. The state of sequences is in the cache, not in the decoder."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_positions: int, operations: Operations = FAST) -> None:
        """max_positions: the rotary tables cover positions 0 .. max_positions - 1."""
        self.spec, self.weights, self.operations, self.max_positions = spec, weights, operations, max_positions
        self.exchange: Exchange = alone  # makes operations gather the columns of other ranks, if there are any
        self.layers_started = c_uint64()  # a count over all steps, which shows that a long step makes progress
        self.ropes = [rope.tables(table, spec.head_dim, max_positions, weights.embed.device) for table in spec.ropes]
        self.query_scales = rope.query_scales(spec.query_scaling, max_positions, weights.embed.device)
        self._forwards = [
            (mixer(layer.mixer.kind).forward, feed_forward(layer.feed_forward.kind).forward) for layer in weights.layers
        ]
        self.norms = [*(layer.before_attention for layer in weights.layers), weights.norm]
        # The scale is rounded to the weights' dtype, as in training: for example, sqrt(1152) is 34 in bfloat16.
        self.embed_scale = torch.tensor(spec.embed_scale).to(weights.embed.dtype).item()

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Writes the K/V of every row and returns the logits of inputs.logits_indices, [R, vocab] float32."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Writes the K/V of every row and returns the final norm's output at inputs.logits_indices, [R, H]."""
        do, spec, last = self.exchange(self.operations), self.spec, len(self.weights.layers) - 1
        kept = spec.last_kept if inputs.few_logits else last
        eps, offset, scale = spec.norm_eps, spec.norm_offset, spec.residual_scale
        x = self.embedded(inputs)
        own = vectors_of_layers(self.weights.layer_inputs, inputs, x, eps, do)
        h = x if self.norms[0] is None else do.rms_norm(x, self.norms[0], eps, offset=offset)
        h = h if inputs.first is None else inputs.first
        step = Step(do, spec, rope.at_columns(self.ropes, inputs.rotary), self.query_scales, inputs, cache)
        for index, (layer, (mix, feed)) in enumerate(zip(self.weights.layers, self._forwards, strict=True)):
            self.layers_started.value += 1
            normed, h = h, mix(h, layer.mixer, index, step, layer.next_weights)  # [T, width of the mixer]
            if index == kept:  # All K/V and states are written. From here on, only the rows with logits are computed.
                if not len(inputs.logits_indices):
                    return x[:0]
                if not inputs.all_logits:
                    h, x, normed = (rows[inputs.logits_indices] for rows in (h, x, normed))
                    own = None if own is None else own[inputs.logits_indices]
                if kept < last:
                    step = replace(step, inputs=inputs.only_logits())
            after, before = layer.after_attention, layer.before_mlp
            h, x = do.linear_add_norm(h, layer.mixer.o, x, before, eps, offset=offset, x_norm=after, scale=scale)
            h, down = feed(normed if spec.parallel else h, x, layer.feed_forward, step)
            before = self.norms[index + 1] if own is None and layer.scale is None else None
            h, x = do.maybe_linear_add_norm(h, down, x, before, eps, offset=offset, x_norm=layer.after_mlp, scale=scale)
            if own is not None and layer.own_input is not None:
                h = x = add_own_input(x, own[:, index], layer.own_input, spec, do)
            if layer.scale is not None:
                h = x = x * layer.scale
            if index < len(inputs.added):
                add_vectors(h, x, inputs, index, self.norms[index + 1], do, spec)
            write_tapped(x, inputs, index, all_rows=index < kept)
            if before is None and (weight := self.norms[index + 1]) is not None:
                h = do.rms_norm(x, weight, eps, offset=offset)
        return h

    def embedded(self, inputs: ForwardInputs) -> Tensor:
        """Returns the scaled embeddings of all rows, [T, H], or what replaces them."""
        x = embedding(inputs.token_ids, self.weights.embed)
        x = x if self.embed_scale == 1.0 else x * self.embed_scale
        return x if inputs.replaced is None else x.index_copy(0, *inputs.replaced)

    def logits(self, h: Tensor) -> Tensor:
        """Computes the logits [R, vocab] float32. h: the normed output of the last layer [R, H]."""
        if not len(h):
            return h.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = self.exchange(self.operations).whole_linear(h, self.weights.head, fp32_out=True)
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def count_replayed(self) -> None:
        """Counts the layers of a forward replayed from a CUDA graph, because a replay does not run forward()."""
        self.layers_started.value += len(self.weights.layers)

    def count_loads(self, loads: Tensor | None = None) -> Tensor:
        """Makes every step add the rows that choose each expert to `loads` [layers, E] int64 (None: new zeros).

        Returns `loads`.
        """
        layers, spec = self.weights.layers, self.spec.experts
        if loads is None:
            shape = (len(layers), 0 if spec is None else spec.count)
            loads = torch.zeros(shape, dtype=torch.int64, device=self.weights.embed.device)
        counting = [
            replace(layer, feed_forward=feed_forward(layer.feed_forward.kind).counting(layer.feed_forward, load))
            for layer, load in zip(layers, loads, strict=True)
        ]
        self.weights = replace(self.weights, layers=counting)
        return loads

    def with_operations(self, operations: Operations) -> "Decoder":
        """Returns a copy of this decoder with other operations. The copy shares the weights and `layers_started`."""
        other = copy(self)
        other.operations = operations
        return other
